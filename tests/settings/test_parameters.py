"""Each option of a verb is a parameter of its Python function with the same default, and the reverse."""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import millionway
from millionway.cli import NEXT, VERBS, main
from millionway.settings import command_line
from millionway.settings.bench import Bench
from millionway.settings.checks import flag
from millionway.settings.collection import Duplicates, Explore, Map, Outliers, Search
from millionway.settings.demo import Demo
from millionway.settings.embed import Embed
from millionway.settings.evaluate import Evaluate
from millionway.settings.export import Export
from millionway.settings.index import Index
from millionway.settings.plan import Plan
from millionway.settings.pretrain import flat
from millionway.settings.report import Report
from millionway.settings.study import Study

# The settings of a verb, and what must be given, so that the rest has its default.
VERB: dict[str, tuple[type, list[str]]] = {
    "evaluate": (Evaluate, ["knn"]),
    "plan": (Plan, []),
    "embed": (Embed, ["--run", "r", "--data", "d", "--out", "o.npy"]),
    "export": (Export, ["--run", "r", "--out", "o"]),
    "index": (Index, ["d", "--out", "o"]),
    "bench": (Bench, ["data", "--data", "d"]),
    "study": (Study, ["components", "--out", "o"]),
    "report": (Report, ["--run", "r"]),
    "demo": (Demo, []),
    "search": (Search, []),
    "duplicates": (Duplicates, []),
    "outliers": (Outliers, []),
    "map": (Map, []),
    "explore": (Explore, []),
}


def parameters(verb: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(millionway, verb)).parameters)


def test_every_verb_is_a_function_and_the_reverse() -> None:
    assert (
        set(VERBS) - {"presets"} == set(millionway.__all__) - {"load_encoder", "open_collection"} == {*VERB, "pretrain"}
    )


@pytest.mark.parametrize("verb", VERB)
def test_options_are_parameters_with_the_same_default(verb: str) -> None:
    settings, needed = VERB[verb]
    options, declared = vars(command_line.parse(settings, needed, verb)), parameters(verb)
    assert set(options) == set(declared)
    for name, parameter in declared.items():
        factory = next(each.default_factory for each in fields(settings) if each.name == name)
        default = parameter.default if factory is MISSING else factory()
        assert default is inspect.Parameter.empty or options[name] == default, name


@pytest.mark.parametrize("command", NEXT)
def test_what_is_advised_after_a_run_can_be_typed(command: str) -> None:
    verb, *words = command.format("runs/photos").split()
    assert vars(command_line.parse(VERB[verb][0], words, verb))["run"] == Path("runs/photos")


@pytest.mark.parametrize("verb", [*VERB, "pretrain"])
def test_every_parameter_is_shown_by_help(verb: str, capsys) -> None:
    main([verb, "--help-all" if verb == "pretrain" else "--help"])
    # A setting that is on by default is shown as the flag that turns it off.
    flags = {text.replace("--no-", "--") for text in re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)}
    positional = {"protocol", "name", "what"} | ({"data"} if verb == "index" else set())
    for name in parameters(verb):
        assert name in positional or flag(name) in flags, name


def test_settings_of_a_run_are_parameters_with_the_same_default() -> None:
    config = flat(command_line.pretrain_settings(["--data", "d", "--out", "o"]))
    declared = parameters("pretrain")
    assert set(config) == set(declared)
    for name, parameter in declared.items():
        if name not in ("data", "out"):
            assert config[name] == parameter.default, name


def test_strings_are_paths_and_numbers_where_these_are_declared(monkeypatch) -> None:
    plan = millionway.plan("2K", batch_size=8, encoder="narrow-resnet", image_size=16, hardest=0, device="cpu")
    assert plan["hybrid"].memory["rows"] == 2000 * 128 * 4
    with pytest.raises(ValueError, match="somewhere"):
        millionway.evaluate("knn", "somewhere")
    with pytest.raises(TypeError, match="lrr"):
        millionway.evaluate("knn", Path("r"), lrr=3)
    for wrong in ({"shares": (0.0,)}, {"flip": 2.0}, {"epochs": 0}, {"detector": "yolo"}, {"lr": float("nan")}):
        with pytest.raises(ValueError, match=flag(next(iter(wrong)))):
            millionway.evaluate("linear", "somewhere", **wrong)
