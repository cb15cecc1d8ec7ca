"""The table of `headway usage`."""

import pytest

from services.mesh.verbs.cli_usage import table_of
from services.mesh.verbs.tables import print_tables
from shared.contracts.base import ModelName, TenantId
from shared.contracts.tenants.usage import UsageReported, UsageRow
from tests.clocks import NOW

ROW = UsageRow(
    tenant=TenantId("acme-production"), hour=int(NOW), model=ModelName("meta-llama/Llama-3.1-8B"),
    qos_class="interactive", requests={"completed": 1234567, "expired": 89012},
    prompt_tokens=123456789, completion_tokens=34567890, cached_tokens=2345678,
)  # fmt: skip


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_names_and_figures_stay_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_tables(table_of(UsageReported(rows=(ROW,)), ("tenant", "hour", "model", "class")))
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "1234567 " in line]

    assert row[0] == "acme-production"
    assert row[-8:-6] == ["meta-llama/Llama-3.1-8B", "interactive"]
    assert row[-6:] == ["1234567", "89012", "123456789", "2345678", "34567890", "158024679"]
