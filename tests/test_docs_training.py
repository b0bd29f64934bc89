"""What docs/training.md shows works as it is written."""

import re

import yaml

from bevatron.config import from_dict
from bevatron.train.course import check_schedule
from bevatron.train.settings import BatchConfig, ScheduleConfig, StageConfig
from doc_pages import blocks

PAGE = "docs/training.md"


def test_its_settings_are_read():
    (values,) = map(yaml.safe_load, blocks(PAGE, "yaml"))
    assert from_dict(BatchConfig, values["batch"], "batch").algorithm == "fixed_count"
    check_schedule(from_dict(ScheduleConfig, values["schedule"], "schedule"), "schedule")
    stages = {
        name: from_dict(StageConfig, v, f"stages.{name}") for name, v in values["stages"].items()
    }
    assert [stage.steps for stage in stages.values()] == [5000, 55000, 2000]
    assert stages["initial"].target == 0.8


def test_its_examples_run(capsys):
    numbers, drawing = blocks(PAGE, "python")
    exec(compile(numbers, PAGE, "exec"), {"__name__": "page"})
    exec(compile(drawing, PAGE, "exec"), {"__name__": "page"})
    assert re.match(r"text \d \(seed \d+\) \[", capsys.readouterr().out)
