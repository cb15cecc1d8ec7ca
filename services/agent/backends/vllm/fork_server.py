"""
A host's fork server makes itself ready by importing this; nobody else does.

On a CPU it then has imported what engine cores need, so that forking one is all there is to do.
Where engine cores are spawned, as on a GPU, it ends: importing models could touch the device.
"""

import importlib
import os
import sys

from vllm.platforms import current_platform

from services.agent.backends.vllm.engine_processes import ARCHITECTURES
from services.agent.backends.vllm.orphans import die_with_parent

if not current_platform.is_cpu():
    sys.exit(0)
die_with_parent()
for _name in (
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "services.agent.backends.vllm.kv.connector",
    "services.agent.backends.vllm.cpu_workers",
    "services.agent.backends.vllm.layer_preemption",
    "services.agent.backends.vllm.policy_scheduler",
    "services.agent.backends.vllm.scheduler",
):
    importlib.import_module(_name)
importlib.import_module("services.agent.backends.vllm.engines").register_early(
    os.environ[ARCHITECTURES].split(",")
)
