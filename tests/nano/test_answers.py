"""North Nano answers a request for a function with Python, through the path that a user takes."""

from __future__ import annotations

import ast

import north_jax
from north_jax.sampling import SamplingParams


def test_writes_a_function_that_parses() -> None:
    model = north_jax.load("north-nano")
    tokenizer = model.tokenizer()
    request = "Write a Python function `count_words(text)`.\n\nReturn the number of words in a text."
    prompt = model.chat_template().encode(
        [{"role": "user", "content": request}], add_generation_prompt=True, reasoning=False
    )
    answers = []
    for seed in range(3):
        sampling = SamplingParams(temperature=0.4, top_p=0.95, seed=seed)
        answers.append(tokenizer.decode(list(north_jax.generate(model.config, model.params, prompt, 100, sampling))))
    parsed = 0
    for answer in answers:
        assert answer.startswith("<|START_TEXT|>")
        code = answer.partition("```python\n")[2].partition("```")[0]
        assert "count_words" in code
        try:
            parsed += isinstance(ast.parse(code).body[0], ast.FunctionDef)
        except SyntaxError:
            continue
    assert parsed >= 2, answers
