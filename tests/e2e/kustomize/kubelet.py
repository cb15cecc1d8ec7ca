"""
Pods of rendered manifests as processes of this machine.

A process gets the command, the variables and the files that its container would get, and nothing
else. What a machine without containers cannot have is mapped: mounted paths to a temporary
directory, ports to free ones, addresses of the broker and of the database to local ones.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from ops.ports import free_port
from tests.brokers import eventually
from tests.unit.ops.deployment import ROOT, entrypoint
from tests.unit.ops.kustomize.manifests import Container, Manifests, Object, Pod, service_links

READY_WITHIN_S = 180.0
INIT_WITHIN_S = 300.0
"""A leader compiles its kernels in an init container."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What stands for a cluster and its images."""

    manifests: Manifests
    directory: Path
    """For volumes, files and logs."""
    home: Path
    """Home directory of the images; containers may not write to it."""
    addresses: Mapping[str, str]
    """Part of a variable's value -> what it is on this machine."""

    def claim(self, name: str) -> Path:
        """Directory of a volume claim, which all pods share."""
        path = self.directory / f"claim-{name}"
        path.mkdir(exist_ok=True)
        return path


class LocalPod:
    """
    One pod.

    Args:
        pod: Its template.
        machine: Where it runs.
    """

    def __init__(self, pod: Pod, machine: Machine) -> None:
        self.pod = pod
        self.name = f"{pod.name}-7c5ddbdf54-x7k2p"
        self._machine = machine
        self._directory = machine.directory / pod.name
        self._directory.mkdir()
        self._volumes = {name: self._volume(volume) for name, volume in pod.volumes.items()}
        self._ports = {
            number: free_port() for each in pod.containers for number in each.ports.values()
        }
        self._process: asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        return self.pod.name

    def port(self, name: str) -> int:
        """Port of this machine that stands for a port of the main container."""
        return self._ports[self.pod.main.ports[name]]

    async def start(self) -> None:
        """Run the init containers in turn, and start the main container."""
        for container in self.pod.containers:
            process = await self._start(container)
            if not container.is_init:
                self._process = process
                continue
            async with asyncio.timeout(INIT_WITHIN_S):
                code = await process.wait()
            assert code == 0, self.log()

    async def until_ready(self) -> None:
        """Ask the probes as the kubelet does, until the pod is ready."""
        startup = self.pod.main.spec["startupProbe"]
        within_s = startup["periodSeconds"] * startup["failureThreshold"]
        await eventually(lambda: self._succeeds("startupProbe"), within_s=within_s)
        await eventually(lambda: self._succeeds("readinessProbe"), within_s=READY_WITHIN_S)
        assert await self._succeeds("livenessProbe")

    async def until_done(self) -> None:
        """Wait until the pod of a job has succeeded."""
        assert self._process is not None
        async with asyncio.timeout(INIT_WITHIN_S):
            code = await self._process.wait()
        assert code == 0, self.log()

    async def stop(self) -> tuple[int | None, float]:
        """
        End the pod as the kubelet does; return the exit code, which is None if the process had to
        be killed, and the time that was left of the grace period.
        """
        assert self._process is not None
        gives_up_at = time.monotonic() + self.pod.spec["terminationGracePeriodSeconds"]
        hook = self.pod.main.spec.get("lifecycle", {}).get("preStop")
        if hook is not None:
            done = await self._start(self.pod.main, hook["exec"]["command"])
            await done.wait()
        code: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(gives_up_at - time.monotonic()):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        return code, gives_up_at - time.monotonic()

    def kill(self) -> None:
        """End the process of a failed test."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def environment(self, container: Container) -> dict[str, str]:
        """All variables of the container's process."""
        manifests = self._machine.manifests
        given = manifests.environment(container, pod_name=self.name)
        if self.pod.spec.get("enableServiceLinks", True):
            given = dict(service_links(manifests)) | given
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self._machine.home),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": self._here("/tmp", container),
            **{name: self._value(name, value, container) for name, value in given.items()},
        }

    def _value(self, name: str, value: str, container: Container) -> str:
        if name.endswith("_PORT") and value.isdecimal():
            return str(self._ports[int(value)])
        if name.endswith("_HOST") and value == "0.0.0.0":
            return "127.0.0.1"
        for there, here in self._machine.addresses.items():
            value = value.replace(there, here)
        return self._here(value, container)

    def _here(self, text: str, container: Container) -> str:
        """*text* with each path of a mounted volume replaced by the path on this machine."""
        mounts = {
            mount["mountPath"]: str(self._volumes[mount["name"]])
            for mount in container.spec.get("volumeMounts", ())
        }
        if not mounts:
            return text
        paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        whole = rf"(?:(?<![\w./-])|(?<=file://))(?:{paths})(?=[/\s'\";]|$)"
        return re.sub(whole, lambda found: mounts[found[0]], text)

    def _volume(self, volume: Object) -> Path:
        if "persistentVolumeClaim" in volume:
            return self._machine.claim(volume["persistentVolumeClaim"]["claimName"])
        path = self._directory / volume["name"]
        path.mkdir()
        for source, kind, key in (
            ("secret", "Secret", "secretName"),
            ("configMap", "ConfigMap", "name"),
        ):
            if source in volume:
                files = self._machine.manifests.data(kind, volume[source][key])
                write_files(path, files, volume[source].get("defaultMode", 0o644))
        return path

    async def _start(
        self, container: Container, command: Sequence[str] = ()
    ) -> asyncio.subprocess.Process:
        environment = self.environment(container)
        words = self._command(container)
        if command:
            words = [self._here(word, container) for word in command]
        log = self._directory / f"{container.spec['name']}.log"
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *map(python_here, words),
                cwd=ROOT,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _command(self, container: Container) -> list[str]:
        arguments = [self._here(word, container) for word in container.spec.get("args", ())]
        if "command" in container.spec:
            command = [self._here(word, container) for word in container.spec["command"]]
            return [*command, *arguments]
        program = entrypoint(container.image.removeprefix("headway-"))
        assert self.pod.spec["automountServiceAccountToken"] is False
        return ["python", "-m", program.replace("headway-", "services."), *arguments]

    async def _succeeds(self, probe: str) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, self.log()
        spec = self.pod.main.spec[probe]
        url = f"http://127.0.0.1:{self.port(spec['httpGet']['port'])}{spec['httpGet']['path']}"
        limit = aiohttp.ClientTimeout(total=spec["timeoutSeconds"])
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                return 200 <= response.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    def log(self) -> str:
        """End of the log of each container that was started."""
        return "\n".join(
            f"{self}/{log.stem}:\n{log.read_text(errors='replace')[-2000:]}"
            for log in sorted(self._directory.glob("*.log"))
        )


def python_here(word: str) -> str:
    """A word of a command with the interpreter of the tests instead of the image's."""
    return re.sub(r"(?<![\w./-])python(?= |$)", sys.executable, word)


def write_files(directory: Path, files: Mapping[str, str], mode: int) -> None:
    for name, content in files.items():
        (directory / name).write_text(content)
        (directory / name).chmod(mode)


@contextlib.asynccontextmanager
async def running(machine: Machine) -> AsyncIterator[dict[str, LocalPod]]:
    """
    Context with all pods ready, except those of the broker; at its end every process has ended by
    itself within its grace period.
    """
    pods = {
        pod.name: LocalPod(pod, machine)
        for pod in machine.manifests.pods
        if pod.owner["kind"] != "StatefulSet"
    }
    jobs = [pod for pod in pods.values() if pod.pod.owner["kind"] == "Job"]
    serving = {name: pod for name, pod in pods.items() if pod not in jobs}
    try:
        await asyncio.gather(*(pod.start() for pod in pods.values()))
        await asyncio.gather(
            *(pod.until_done() for pod in jobs), *(pod.until_ready() for pod in serving.values())
        )
        yield serving
        ends = await asyncio.gather(*(pod.stop() for pod in serving.values()))
    except BaseException as error:
        error.add_note("\n".join(pod.log() for pod in pods.values()))
        raise
    finally:
        for pod in pods.values():
            pod.kill()
    codes = {name: code for name, (code, _) in zip(serving, ends, strict=True)}
    assert codes == dict.fromkeys(serving, 0)
    assert all(left_s > 0 for _, left_s in ends)
