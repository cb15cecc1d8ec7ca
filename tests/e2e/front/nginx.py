"""An nginx in front of a server, as Debian's package installs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ops.ports import free_port
from tests.brokers import eventually
from tests.requirements import program

_CONFIG = """
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {target};
      proxy_http_version 1.1;
      proxy_read_timeout {read_timeout_s}s;
    }}
  }}
}}
"""


@asynccontextmanager
async def nginx(target: str, directory: Path, *, read_timeout_s: int) -> AsyncIterator[str]:
    """
    Context with the URL of an nginx that passes requests to *target*, and closes connections on
    which nothing arrives for *read_timeout_s*.
    """
    path, port = program("nginx", "nginx"), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "nginx.conf"
    config.write_text(
        _CONFIG.format(directory=directory, port=port, target=target, read_timeout_s=read_timeout_s)
    )
    arguments = ("-c", str(config), "-p", str(directory), "-e", str(directory / "start.log"))
    process = await asyncio.create_subprocess_exec(path, *arguments)

    async def is_open() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await eventually(is_open)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
