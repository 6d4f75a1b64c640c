"""Fits the cost model of `hotset plan` to measured decode steps, and prints its coefficients and errors.

    python benchmarks/fit_costs.py

The measured steps are in benchmarks/decode_figures.json. Weights are read at the speed of a copy. The coefficients of
the other five terms minimise the squared relative error. They belong into `Coefficients` in hotset/lab/plan/costs.py.
Needs no GPU. Bar: every predicted step is within 15 % of the measured one.
"""

import sys

import numpy as np
from decode_figures import read_figures
from report import Bar, make_parser, report

from hotset.lab.plan.costs import COEFFICIENTS
from hotset.models.attention.dsa_spec import MlaSpec

NAMES = ("layer_us", "keys", "attention", "swap_first", "swap_shared")


def main() -> None:
    options = make_parser(__doc__).parse_args()
    figures = read_figures()
    terms, rest, measured = [], [], []
    for figure in figures:
        step, attention = figure.predicted(), figure.spec().attention
        assert isinstance(attention, MlaSpec)
        selecting = len(attention.index.full_layers) / figure.spec().layers
        shares = (
            step.layers_s / COEFFICIENTS.layer_us,
            step.keys_s / COEFFICIENTS.keys,
            step.attention_s / COEFFICIENTS.attention,
            step.bus_s * selecting,
            step.bus_s * (1 - selecting),
        )
        terms.append(shares)
        rest.append(figure.step_s - step.weights_s)
        measured.append(figure.step_s)
    scale = np.array(measured)
    fitted, *_ = np.linalg.lstsq(np.array(terms) / scale[:, None], np.array(rest) / scale, rcond=None)
    errors = (np.array(terms) @ fitted - np.array(rest)) / scale
    rows = [
        {
            "model": figure.model,
            "context": figure.context,
            "requests": figure.requests,
            "step ms": figure.step_s * 1e3,
            "predicted ms": figure.step_s * (1 + error) * 1e3,
            "error": float(error),
        }
        for figure, error in zip(figures, errors, strict=True)
    ]
    note = "fitted: " + ", ".join(
        f"{name} {value:.3f} (now {getattr(COEFFICIENTS, name):g})" for name, value in zip(NAMES, fitted, strict=True)
    )
    report("Steps on one H200 and the cost model fitted to them", rows, options.json, note)
    bar = Bar("largest error", float(np.abs(errors).max()), 0.15)
    report("Bar", [bar.row()], None)
    sys.exit(0 if bar.met else 1)


if __name__ == "__main__":
    main()
