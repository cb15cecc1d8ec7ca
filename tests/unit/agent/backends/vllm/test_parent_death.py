"""Children of the engine host die with the process that has forked them."""

import subprocess
import sys

import pytest

# Forks a child, which forks a grandchild. Each process reports when it has passed the hook.
FAMILY = """
import os, sys, time
from services.agent.backends.vllm.host.processes.parent_death import die_with_parent

die_with_parent()
read, write = os.pipe()
child = os.fork()
if child == 0:
    grandchild = os.fork()
    if grandchild == 0:
        os.write(write, b"grandchild\\n")
        time.sleep(60)
    os.waitpid(grandchild, 0)
    os._exit(1)
os.close(write)
alive = os.read(read, 100)
os.kill(child, 9)
os.waitpid(child, 0)
# The pipe closes when its last writer, the grandchild, has ended.
rest = os.read(read, 100)
print(alive, rest)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has PR_SET_PDEATHSIG")
def test_a_child_of_a_child_lives_until_its_own_parent_dies() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FAMILY], capture_output=True, text=True, check=True, timeout=30
    )

    assert run.stdout.split() == [r"b'grandchild\n'", "b''"]
