"""Rehearses the next steps of a run: what they take of each source, and what will go wrong.

    tokenpipe plan run.yaml --steps 10000
    tokenpipe plan run.yaml --steps 10000 --state state.json --picture plan.png --holdout evaluation.yaml

Nothing of the token files is read but what a state or a hold-out is compared by. Steps are the run's own numbers,
from the state's step on; a run's journal is a part of its state.
"""

import argparse
import json

from ..datapipes import Topology, load_recipe
from ..datapipes.atomic import check_replaceable
from ..datapipes.errors import BatchSizeError
from ..reading_services import DataLoader2
from .runs import add_run_arguments, read_state

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="how many steps to rehearse")
    parser.add_argument(
        "--holdout",
        action="append",
        default=[],
        metavar="RECIPE",
        help="an evaluation's recipe, of which nothing may be trained on (may be given several times)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with the shares over the tokens")
    parser.add_argument("--picture", metavar="FILE", help="also draw the shares over the tokens: a .png or .svg file")


def run(arguments: argparse.Namespace) -> int:
    dp, micro_batch = arguments.dp, arguments.micro_batch
    if arguments.picture is not None:
        check_replaceable(arguments.picture)
    try:
        graph = load_recipe(arguments.recipe, Topology(dp_size=dp), micro_batch)
        dp = micro_batch = None
    except BatchSizeError:
        if dp == 1 and micro_batch is None:
            raise
        graph = load_recipe(arguments.recipe)  # the plan names every size that this layout does not divide
    loader = DataLoader2(graph)
    if arguments.state is not None:
        loader.load_state_dict(read_state(arguments.state))
    plan = loader.plan(arguments.steps, [load_recipe(path) for path in arguments.holdout], dp, micro_batch)
    print(json.dumps(plan.as_json()) if arguments.json else plan)
    if arguments.picture is not None:
        plan.draw(arguments.picture)
    return 0
