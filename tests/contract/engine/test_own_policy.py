"""The policy of a guide inside vLLM's engine core, from an installed package."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.contracts.errors import EngineError
from tests.contract.engine.engines import EngineRig, greedy, prompt_of, vllm_rig
from tests.e2e.guides.guide_blocks import blocks_of, page_of
from tests.unit.runtime.packages import installer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
NAME = "aged-short"
MARK = "HEADWAY_TEST_POLICY_PROCESSES"
MARKING = f"""
import os
with open(os.environ["{MARK}"], "a") as file:
    print(os.getpid(), file=file)
"""


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the processes that import the policy, which is installed for all of them."""
    (code,) = (each.text for each in blocks_of(page_of("own-policy")) if each.language == "python")
    install(tmp_path, monkeypatch, code + MARKING)
    monkeypatch.setenv(MARK, str(tmp_path / "processes"))
    return tmp_path / "processes"


def install(folder: Path, patch: pytest.MonkeyPatch, code: str) -> None:
    """Install a package with the policy, also for new processes."""
    installed = folder / "installed"
    installer(installed, patch)("headway.policies", NAME, "aged_short:AgedShort", code)
    paths = (str(installed / "package-0"), os.environ.get("PYTHONPATH", ""))
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest_asyncio.fixture
async def rig(processes: Path, tmp_path: Path) -> AsyncIterator[EngineRig]:
    rig = vllm_rig(tmp_path, policy=NAME)
    await rig.bring_up()
    yield rig
    await rig.engine.close()


async def test_engine_core_serves_by_the_policy_of_a_package(
    rig: EngineRig, processes: Path
) -> None:
    prompts = [prompt_of(length, first=length) for length in (500, 20, 300, 40)]
    alone = [(await rig.ask(prompt, greedy(8))).token_ids for prompt in prompts]
    together = await asyncio.gather(*(rig.ask(prompt, greedy(8)) for prompt in prompts))

    assert alone == [answer.token_ids for answer in together]
    assert rig.engine_processes() & set(map(int, processes.read_text().split()))


async def test_policy_without_a_method_is_named_by_the_agents_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "class AgedShort:\n    def __init__(self, latency): ...\n")
    rig = vllm_rig(tmp_path, policy=NAME)
    try:
        with pytest.raises(EngineError, match=r"'aged-short' .* does not fit SchedulingPolicy"):
            await rig.bring_up()
    finally:
        await rig.engine.close()
