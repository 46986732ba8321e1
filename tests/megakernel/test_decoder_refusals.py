"""What MegakernelDecoder refuses when it is made."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config, tiny_params

import ffi
from north_jax.decoding import BackendError
from north_jax.megakernel.decoder import MegakernelDecoder

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "")
pytestmark = pytest.mark.skipif(not ffi.available(PLATFORM), reason=str(ffi.build_info()))

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


def refused(params, message, config=CONFIG, slots=4):
    with pytest.raises(BackendError, match=message):
        MegakernelDecoder(config, params, slots=slots, max_context=100)


def test_what_it_cannot_run_is_refused_by_name(params):
    refused(params, "at most 32 slots together, not 33", slots=33)
    refused(jax.tree.map(lambda x: x.astype(jnp.float16), params), "bfloat16 and float32 weights, not float16")
    refused(params | {"embed": params["embed"].astype(jnp.bfloat16)}, "embed is bfloat16, .* is float32")
    refused(params | {"final_norm": np.zeros(32, np.float32)}, "final_norm is a ndarray")
    many = tiny_config(num_experts=32, num_experts_per_tok=17)
    refused(tiny_params(many), "at most 16 experts a token, not 17", config=many)


@pytest.mark.parametrize("origin", [-1, 2**32])
def test_counters_begin_with_a_uint32(params, origin):
    with pytest.raises(ValueError, match=f"counter_origin is {origin}, expected a uint32"):
        MegakernelDecoder(CONFIG, params, slots=4, max_context=100, counter_origin=origin)


def test_without_compiled_code_it_is_refused(params, monkeypatch):
    monkeypatch.setattr(ffi, "available", lambda platform: False)
    refused(params, "the megakernel needs compiled code for ")


SHARDED = """
import jax
from support import tiny_config, tiny_params
from north_jax.decoding import BackendError, make_decoder
config = tiny_config()
params = tiny_params(config)
mesh = jax.make_mesh((2,), ("x",))
params["embed"] = jax.device_put(params["embed"], jax.NamedSharding(mesh, jax.P(None, "x")))
try:
    make_decoder(config, params, backend="megakernel", slots=1, max_context=64)
except BackendError as error:
    print(error)
"""


def test_weights_on_several_devices_are_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, check=True)
    assert "the megakernel runs on one device, embed has the sharding NamedSharding" in done.stdout
