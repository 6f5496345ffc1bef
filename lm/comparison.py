"""`lm compare --html`: loss curves, settings against results, and the settings of any two runs, in one file."""

from __future__ import annotations

import html
import json
from typing import Any, Dict, List, Sequence, Tuple

from lm.charts import Line, curves, page, parallel_coordinates
from lm.compare import Run, differing, law_in_words, rows, shown
from lm.run import RunFolder
from lm.tracking.run import loss_lines

# Two choices of a run, and a table of what they have otherwise; rows[i] are the settings of run i.
CHOICE = """
<p><select id="one"></select> against <select id="other"></select></p><table id="difference"></table>
<script>
const names = {names}, settings = {settings};
const [one, other, table] = ["one", "other", "difference"].map(id => document.getElementById(id));
for (const select of [one, other]) names.forEach((name, i) => select.add(new Option(name, i)));
other.value = names.length - 1;
const cell = text => Object.assign(document.createElement("td"), {{textContent: text}});
function show() {{
  const [a, b] = [settings[one.value], settings[other.value]];
  const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].filter(key => a[key] !== b[key]);
  table.replaceChildren(...keys.map(key => {{
    const row = document.createElement("tr");
    row.append(cell(key), cell(a[key] ?? ""), cell(b[key] ?? ""));
    return row;
  }}));
}}
one.onchange = other.onchange = show;
show();
</script>
"""


def comparison_page(title: str, runs: Sequence[Run]) -> str:
    """The whole page. runs: at least one; a section is left out where no run has what it shows."""
    names = _names(runs)
    lines = [(name, run, _losses(run)) for name, run in zip(names, runs)]
    by_tokens = [Line(name, points) for name, _, points in lines if points]
    by_dollars = [
        Line(name, [(tokens / run.summary["tokens_per_usd"], loss) for tokens, loss in points])
        for name, run, points in lines
        if points and run.summary.get("tokens_per_usd")
    ]
    sections = {"Runs": _table(rows(runs))}
    if by_tokens:
        sections["Validation loss against tokens"] = curves("tokens", "nats a token", by_tokens)
    if by_dollars:
        sections["Validation loss against dollars"] = curves("US dollars", "nats a token", by_dollars)
    axes, values = _coordinates(runs, names)
    if len(axes) > 1 and values:
        sections["Settings and results"] = parallel_coordinates(axes, values)
    law = law_in_words(runs)
    if law:
        sections["Scaling law"] = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in law)
    if len(runs) > 1:
        known = [{key: str(value) for key, value in run.settings.items()} for run in runs]
        sections["Settings of two runs"] = CHOICE.format(names=_script(names), settings=_script(known))
    return page(title, sections)


def _names(runs: Sequence[Run]) -> List[str]:
    """The last part of each folder's path, or two where one is not enough."""
    short = [run.folder.name for run in runs]
    return short if len(set(short)) == len(short) else [f"{run.folder.parent.name}/{run.folder.name}" for run in runs]


def _losses(run: Run) -> Sequence[Tuple[float, float]]:
    """Tokens and validation loss of each evaluation."""
    return next((line.points for line in loss_lines(RunFolder(run.folder)) if line.name == "validation"), [])


def _coordinates(runs: Sequence[Run], names: Sequence[str]) -> Tuple[List[str], Dict[str, Sequence[float]]]:
    """Settings that are numbers and differ, and the validation loss, of the runs that have them all."""
    settings = [name for name in differing(runs) if all(_is_number(run.settings.get(name)) for run in runs)]
    ended = [(name, run) for name, run in zip(names, runs) if _is_number(run.summary.get("val_loss"))]
    values: Dict[str, Sequence[float]] = {
        name: [*(float(run.settings[key]) for key in settings), float(run.summary["val_loss"])] for name, run in ended
    }
    return [*settings, "val_loss"], values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _table(found: List[Dict[str, Any]]) -> str:
    heading = "".join(f"<th>{html.escape(name)}</th>" for name in found[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(shown(value))}</td>" for value in row.values()) + "</tr>" for row in found
    )
    return f"<table><tr>{heading}</tr>{body}</table>"


def _script(value: Any) -> str:
    """JSON that may stand within a script: nothing in it ends that."""
    return json.dumps(value).replace("<", "\\u003c")
