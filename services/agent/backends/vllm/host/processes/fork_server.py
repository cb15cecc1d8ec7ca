"""
Prepares a host's fork server; only the fork server imports this module.

On a CPU the server imports the modules that engine cores need, so that starting a core takes only a
fork. On a GPU engine cores are spawned, so the server is not needed and ends. Importing models
there could initialize the device.
"""

import importlib
import os
import sys

from vllm.platforms import current_platform

from services.agent.backends.vllm.host.processes.engine_processes import ARCHITECTURES
from services.agent.backends.vllm.host.processes.parent_death import die_with_parent

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
    "services.agent.backends.vllm.worker.cpu",
    "services.agent.backends.vllm.core.layer_preemption",
    "services.agent.backends.vllm.core.policy_scheduler",
    "services.agent.backends.vllm.core.scheduler",
):
    importlib.import_module(_name)
importlib.import_module("services.engine_core.models").import_architectures(
    os.environ[ARCHITECTURES].split(",")
)
