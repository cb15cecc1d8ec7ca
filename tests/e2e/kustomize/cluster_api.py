"""The part of the API of Kubernetes that agents use, with the rights of rendered roles."""

import asyncio
import contextlib
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from ops.ports import free_port
from tests.requirements import program
from tests.unit.ops.kustomize.manifests import Manifests

TOKEN = "token-of-headway-attached"
PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
GROUP = "discovery.k8s.io"


def may(manifests: Manifests, account: str, verb: str, namespace: str) -> bool:
    """Whether a service account may do *verb* with endpointslices of a namespace."""
    for binding in manifests.of("RoleBinding"):
        if binding["metadata"]["namespace"] != namespace:
            continue
        if account not in [subject["name"] for subject in binding["subjects"]]:
            continue
        role = manifests.named("Role", binding["roleRef"]["name"])
        for rule in role["rules"]:
            if GROUP in rule["apiGroups"] and "endpointslices" in rule["resources"]:
                return verb in rule["verbs"]
    return False


@dataclass
class ClusterApi:
    """
    A server that lists and watches the EndpointSlices of one Service.

    Args:
        manifests: Have the roles.
        account: Service account whose token is `TOKEN`.
        server: Host and port of the only ready pod of the Service `chat`.
    """

    manifests: Manifests
    account: str
    server: tuple[str, int]
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Verb, namespace and label selector of each request that was allowed."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Verb and namespace of each other request."""

    @contextlib.asynccontextmanager
    async def serving(self, directory: Path) -> AsyncIterator[tuple[int, dict[str, str]]]:
        """Context with the running server: its port, and the files of the account's volume."""
        certificate, key = certificate_in(directory)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        application = web.Application()
        application.router.add_get(PATH, self._answer)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        try:
            yield port, {"token": TOKEN, "ca.crt": certificate.read_text()}
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if "watch" in request.query else "list"
        namespace = request.match_info["namespace"]
        is_known = request.headers.get("authorization") == f"Bearer {TOKEN}"
        if not is_known or not may(self.manifests, self.account, verb, namespace):
            self.refused.append((verb, namespace))
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        self.asked.append((verb, namespace, request.query["labelSelector"]))
        if verb == "list":
            found = {"metadata": {"resourceVersion": "10"}, "items": [self._slice()]}
            return web.json_response(found)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "11"}}}
        await response.write(json.dumps(bookmark).encode() + b"\n")
        await asyncio.Event().wait()  # nothing changes until the agent ends the watch
        return response

    def _slice(self) -> dict[str, Any]:
        host, port = self.server
        return {
            "metadata": {"name": "chat-x7k2p", "namespace": "models", "resourceVersion": "9"},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [host], "conditions": {"ready": True}}],
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        }


def certificate_in(directory: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1; return its file and the file of its key."""
    certificate, key = directory / "api.crt", directory / "api.key"
    subprocess.run(
        [
            *(program("openssl", "openssl"), "req", "-x509", "-nodes", "-days", "2"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
