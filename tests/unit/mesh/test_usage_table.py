"""The table of `headway usage`."""

from io import StringIO

import pytest
from rich.console import Console

from services.mesh.verbs.cli_usage import table_of
from shared.contracts.base import ModelName, TenantId
from shared.contracts.tenants.usage import UsageReported, UsageRow
from tests.clocks import NOW

ROW = UsageRow(
    tenant=TenantId("acme-production"), hour=int(NOW), model=ModelName("meta-llama/Llama-3.1-8B"),
    qos_class="interactive", requests={"completed": 1234567, "expired": 89012},
    prompt_tokens=123456789, completion_tokens=34567890, cached_tokens=2345678,
)  # fmt: skip


@pytest.mark.parametrize("columns", [80, 140])
def test_all_figures_fit_a_terminal(columns: int):
    out = StringIO()
    table = table_of(UsageReported(rows=(ROW,)), ("tenant", "hour", "model", "class"))
    Console(file=out, width=columns, no_color=True).print(table)
    lines = out.getvalue().splitlines()

    assert max(map(len, lines)) <= columns
    (figures,) = [line.split()[-6:] for line in lines if "1234567 " in line]
    assert figures == ["1234567", "89012", "123456789", "2345678", "34567890", "158024679"]
