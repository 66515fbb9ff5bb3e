"""A command is one module and its name in a list."""

import argparse
import pkgutil

import pytest

from converge_harness.cli import commands
from converge_harness.cli.parser import COMMANDS, command


def test_every_module_of_a_command_is_named_once():
    modules = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    assert sorted(COMMANDS) == modules


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_all_that_the_parser_and_a_mistake_ask_for(name):
    each = command(name)
    assert each.HELP
    assert each.DESCRIPTION
    assert isinstance(each.EPILOG, str)
    assert each.NOT_DONE == "" or each.NOT_DONE.startswith(", nothing was ")
    each.arguments(argparse.ArgumentParser())
    assert callable(each.run)
