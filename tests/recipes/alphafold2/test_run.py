"""Runs of AlphaFold2: they learn, resume to the last bit and start from weights of others."""

import json

import numpy as np
import pytest
import torch
from conftest_chains import MODEL
