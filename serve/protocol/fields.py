"""The fields of a request that are not in its struct: what is taken without effect, and what we don't do (yet).

A field in neither table is unknown and refused. One that we don't do is refused too, unless its value is neutral: asks
for nothing that would not happen anyway. null is always neutral.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = Mapping[str, tuple[object, ...]]

# Hints for OpenAI's own operation (who asks, storing, billing, caching); no effect on what is generated.
IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

CHAT_NEUTRAL: Neutral = {
    "audio": (),
    "function_call": ("none",),  # the form before tools
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION_NEUTRAL: Neutral = {
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
