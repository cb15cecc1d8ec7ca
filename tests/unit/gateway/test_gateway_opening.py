"""The gateway's HTTP interface before its front is loaded."""

import httpx

from services.gateway.opening import Opening
from shared.runtime.health import Health, health_app


async def test_requests_are_refused_until_the_front_is_set():
    health = Health(service="gateway")
    opening = Opening(health)
    transport = httpx.ASGITransport(app=opening)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("DELETE", "/v1/files/file-1"),
        ):
            refused = await client.request(method, path)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "mesh_unavailable"
            assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json()["reasons"] == {"start": "starting"}

        opening.application = health_app(health)
        assert (await client.post("/v1/chat/completions", json={})).status_code == 404
