"""A session of a real model goes on in another process, to the bit; under anything else it is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from continue_session import MORE, load

from hetero.engine import Engine, SamplingParams
from hetero.kernels.cpu import isa

PROMPT = torch.randint(3, 128, (75,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def trip(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Any]:
    """(checkpoint, session exported after 12 tokens, what comes after them at home)."""
    path = tmp_path_factory.mktemp("trip") / "a.session"
    with Engine(load(str(checkpoint("mixtral")), 0.1), kv_memory="16MiB") as engine:
        whole = engine.session(PROMPT, stream=(5, 6))
        engine.generate([whole], SamplingParams(max_tokens=32, ignore_eos=True))
        engine.reset_cache()
        session = engine.session(PROMPT, stream=(5, 6))
        engine.generate([session], SamplingParams(max_tokens=12, ignore_eos=True))
        engine.export_session(session, path)
        engine.generate([session], MORE)
        assert (session.token_ids, session.logprobs) == (whole.token_ids, whole.logprobs)
    return checkpoint("mixtral"), path, [whole.token_ids[87:], whole.logprobs[87:]]


def elsewhere(trip: tuple[Path, Path, Any], size: float, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("continue_session.py")), *map(str, (*trip[:2], size))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_continues_with_the_same_bits(trip: tuple[Path, Path, Any]) -> None:
    assert elsewhere(trip, 0.1) == [*trip[2], 86]


def test_another_adapter_is_refused(trip: tuple[Path, Path, Any]) -> None:
    assert "they differ in adapter (" in elsewhere(trip, 0.2)


@pytest.mark.skipif(isa() == "scalar", reason="the session was made with it")
def test_another_instruction_set_is_refused(trip: tuple[Path, Path, Any]) -> None:
    assert f"they differ in instruction set ({isa()} there, scalar here)" in elsewhere(
        trip, 0.1, HETERO_ISA="scalar"
    )
