"""`headway doctor`: what a machine, a broker and services lack of what the mesh needs."""

from pathlib import Path

from services.mesh.doctor.doctor import diagnose
from services.mesh.doctor.findings import Level
from services.mesh.doctor.machine import on_machine
from services.mesh.verbs.options import DATA_DIR, AmqpUrl, file_of
from shared.broker.connect import scheme_of
from shared.contracts.errors import SettingsError
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import File, Folder, JsonOption
from shared.runtime.settings import DEFAULT_AMQP_URL, masked_url


async def doctor(
    *,
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    registry: File | None = None,
    data_dir: Folder = Path(DATA_DIR),
    json: JsonOption = False,
) -> int:
    """
    Check this machine, the broker, and the services and instances of a mesh.

    Args:
        registry: Models whose files are checked; default: HEADWAY_REGISTRY, else none.
        data_dir: Directory of the store, whose disk is checked.

    Raises:
        SettingsError: The URL is not one of a broker.
    """
    if scheme_of(amqp_url) == "memory":
        raise SettingsError("`doctor` needs a broker: --amqp-url amqp://user:password@host/vhost")
    registry = registry or file_of("HEADWAY_REGISTRY")
    findings = list(on_machine(data_dir=data_dir.absolute(), registry=registry))
    findings += [finding async for finding in diagnose(amqp_url, SystemClock())]
    if json:
        print_data(findings, as_json=True)
    else:
        print(f"{masked_url(amqp_url)}\n")
        print("\n".join(finding.text for finding in findings))
    is_fine = all(finding.level is not Level.DEVIATION for finding in findings)
    return EXIT_OK if is_fine else EXIT_FAILED
