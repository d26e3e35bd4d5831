"""Fixtures of tests of rows."""

from helpers.row_fixtures import config as config
from helpers.row_fixtures import load as load
from helpers.row_fixtures import tokenizer as tokenizer
from helpers.row_fixtures import write as write
