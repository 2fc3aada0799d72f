"""Figures: drawn by name, the same file each time, in both formats; what is missing is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from zdp_bench.errors import UserError
from zdp_bench.registry import names
from zdp_bench.report import figures

TABLES = Path(__file__).resolve().parents[2] / "results" / "tables"


def test_a_figure_is_the_same_file_each_time(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    shutil.copy(TABLES / "epsilon.csv", tmp_path / "tables")
    made = []
    for _ in range(2):
        paths = figures.write(figures.draw("epsilon", tmp_path, tmp_path), "epsilon", tmp_path)
        assert [path.name for path in paths] == ["epsilon.png", "epsilon.svg", "epsilon.pdf"]
        made.append([path.read_bytes() for path in paths])
    assert made[0] == made[1]
    assert made[0][0].startswith(b"\x89PNG")
    assert "ε tight" in made[0][1].decode()
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "epsilon.pdf",
        "epsilon.png",
        "epsilon.svg",
    ]


def test_the_nearest_figure_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"figure 'epsilom' is not known\. Did you mean 'epsilon'"):
        figures.draw("epsilom", tmp_path, tmp_path)


@pytest.mark.parametrize("name", names("figure"))
def test_a_figure_without_records_and_data_says_how_to_get_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"zdp-bench|paths\.data|--root"):
        figures.draw(name, tmp_path / "results", tmp_path / "data")


@pytest.mark.parametrize("labels", [["a"], ["short"] * 4, ["a curve with a long name " * 3] * 5])
def test_a_legend_is_as_wide_as_its_figure_at_most(labels: list[str]) -> None:
    figure = Figure(figsize=(7, 3))
    axes = figure.subplots()
    for place, label in enumerate(labels):
        axes.plot([0, 1], label=f"{label} {place}")
    figures.legend_below(figure)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert len(legend.get_texts()) == len(labels)


def test_a_figure_may_be_saved_by_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, figure = tmp_path / "figure.png", Figure()

    def save_between(target: object, **options: object) -> None:
        Figure.savefig(figure, target, **options)  # type: ignore[arg-type]
        figures.save(Figure(), path)

    monkeypatch.setattr(figure, "savefig", save_between)
    figures.save(figure, path)
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]
