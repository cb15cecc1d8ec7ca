"""Names are found in every form of PromQL expression that rules and boards use."""

import pytest

from tests.unit.ops.dashboards.promql import names_in


@pytest.mark.parametrize(
    ("expression", "selected", "listed"),
    [
        ("up", [("up", set())], set()),
        ("time() - max(made_at)", [("made_at", set())], set()),
        ('up{job="a{b}", x!~"c"}', [("up", {"job", "x"})], set()),
        ("sum by (a, b) (rate(n_total[5m])) > 0.5", [("n_total", set())], {"a", "b"}),
        ("sum(n) by (a)", [("n", set())], {"a"}),
        ("(x == 0) * on (a) group_left (b) y", [("x", set()), ("y", set())], {"a", "b"}),
        ("x and on () (y or vector(0)) == 0", [("x", set()), ("y", set())], set()),
        ("level:x:increase1h > 14.4 * 2", [("level:x:increase1h", set())], set()),
        ("max(x unless on (lane) y)\n> 60 # seconds", [("x", set()), ("y", set())], {"lane"}),
        (
            "histogram_quantile(0.9, sum by (le) (rate(x_bucket[1m])))",
            [("x_bucket", set())],
            {"le"},
        ),
        ("topk(10, x) offset 5m", [("x", set())], set()),
    ],
)
def test_names_of_series_and_labels(expression: str, selected: list[object], listed: set[str]):
    found = names_in(expression)

    assert [(name, set(labels)) for name, labels in found.selected] == selected
    assert found.listed == listed


@pytest.mark.parametrize("expression", ['{job="a"}', "x ? y"])
def test_expressions_whose_names_cannot_be_found_are_refused(expression: str):
    with pytest.raises(ValueError, match=r"selector|unknown"):
        names_in(expression)
