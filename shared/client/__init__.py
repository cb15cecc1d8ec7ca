"""
Client of a Headway mesh over AMQP: submits requests, reads their answers, cancels them, and asks
about them. `connect` is for asyncio, `connect_sync` for programs without it.
"""

from shared.client.client import Answer, Client, connect
from shared.client.errors import RequestError
from shared.client.sync import SyncAnswer, SyncClient, connect_sync
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerUnavailableError,
    CapacityError,
    ContractError,
    MeshError,
    SettingsError,
)
from shared.contracts.requests import ErrorInfo, RequestCompleted
from shared.contracts.stored import RequestState, RequestStatus
from shared.producer.effects import NewTokens
from shared.producer.generation import RunDivergedError

__all__ = [
    "Answer",
    "BrokerAccessError",
    "BrokerUnavailableError",
    "CapacityError",
    "Client",
    "ContractError",
    "ErrorInfo",
    "MeshError",
    "NewTokens",
    "RequestCompleted",
    "RequestError",
    "RequestState",
    "RequestStatus",
    "RunDivergedError",
    "SettingsError",
    "SyncAnswer",
    "SyncClient",
    "connect",
    "connect_sync",
]
