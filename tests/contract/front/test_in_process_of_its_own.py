"""Tests that import vLLM, in a process of their own: vLLM changes the process that imports it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from tests.requirements import absent

pytestmark = pytest.mark.vllm
HERE = Path(__file__).parent
NAMES = (
    "answer_steps",
    "host_calls",
    "image_reading",
    "derived_entries",
    "checked_grammars",
    "body_ranges",
)
FILES = tuple(HERE / f"{name}.py" for name in NAMES)
IGNORED = ("-W", "ignore::DeprecationWarning")
"""vLLM uses deprecated functions of torch."""
LIMIT_S = 300.0
"""A test that waits for an answer forever must not stop the whole run."""
ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


def test_tests_that_import_vllm_pass() -> None:
    if (reason := vllm_unavailable_reason()) is not None:
        absent(reason, "vllm")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *IGNORED, *map(str, FILES)],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )

    assert ran.returncode == 0, ran.stdout[-4000:]
    assert " passed" in ran.stdout
