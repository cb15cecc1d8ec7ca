"""What a mesh in one process loads before its first request."""

import subprocess
import sys

PROGRAM = """
import sys
import services.mesh.embedded
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


def test_services_load_no_large_package_that_only_workers_need():
    large = ("huggingface_hub", "numba", "ortools", "pandas", "scipy", "sklearn", "torch", "vllm")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *large], check=True, capture_output=True, text=True
    )

    assert ran.stdout == "\n"
