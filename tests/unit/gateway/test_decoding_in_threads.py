"""Types that threads decode are examined by msgspec before the first thread begins."""

import subprocess
import sys

PROGRAM = """
import msgspec._utils
from services.gateway.batches.lines import custom_id_of, parse_line
from shared.api.calls import call_body, call_fields, call_size
from shared.contracts.requests import ApiCall
import msgspec


def examined(*_):
    raise AssertionError("a type is examined at its first use")


msgspec._utils._get_class_mro_and_typevar_mappings = examined
chat = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"slo":{"ttft_s":1}}'
call_body(call_fields(chat))
call_size(ApiCall(endpoint="/v1/chat/completions", body=msgspec.Raw(chat)))
line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":' + chat + b"}"
parse_line(line, endpoint="/v1/chat/completions", check=lambda _fields: None)
custom_id_of(line)
"""


def test_types_of_bodies_are_examined_when_their_modules_are_imported():
    """Two threads that examine one type at once crash the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
