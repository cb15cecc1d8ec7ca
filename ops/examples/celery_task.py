"""Celery task that asks a mesh and waits for the answer: `celery --app celery_task worker`."""

import os
from contextlib import ExitStack
from functools import cache

from celery import Celery
from celery.signals import worker_process_shutdown
from headway_client import BrokerUnavailableError, SyncClient, connect_sync

URL = os.environ.get("HEADWAY_AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/")
app = Celery("headway", broker=URL, backend="rpc://")
clients = ExitStack()


@cache
def client() -> SyncClient:
    """The client of this process, which is opened after the pool has forked."""
    return clients.enter_context(connect_sync(URL, name="celery"))


@worker_process_shutdown.connect
def disconnect(**_: object) -> None:
    clients.close()


@app.task(autoretry_for=(BrokerUnavailableError,), retry_backoff=True, acks_late=True)
def ask(prompt: str) -> str:
    """The answer to a prompt; a task that Celery delivers again asks again."""
    answer = client().submit(
        model="tiny-llama", prompt=prompt, max_tokens=8, temperature=0.0, reply="final"
    )
    text: str = answer.wait(timeout_s=60.0).text
    return text


if __name__ == "__main__":
    app.worker_main(["worker"])
