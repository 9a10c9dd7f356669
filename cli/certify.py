"""Eight bytes for each step of a run: the same on every layout, and compared with another run's.

    tokenpipe certify run.yaml --state state.json --steps 0:81210 --output run.cert
    tokenpipe certify --compare run.cert other.cert

Worked out from the recipe, the state and the token files. A training loop that adds up `batch_certificate` of its
batches has the same numbers of what it was really given. Comparing ends with status 0 where all steps that both have
are the same, else with status 1 and the first step that differs. What a certificate covers, and what not, is
told in the docstring of tokenpipe.datapipes.audit.
"""

import argparse

from tqdm import tqdm

from ..datapipes import Certificate, certify
from ..datapipes.atomic import check_replaceable
from ..datapipes.errors import ConfigurationError
from .runs import add_run_arguments, as_steps, open_run, seen_steps
from .tables import escaped

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, recipe_optional=True)
    parser.add_argument("--steps", metavar="A:B", help="which steps; left out: those up to the state's place")
    parser.add_argument("--output", metavar="FILE", help="where the certificate goes")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two certificates instead")


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        if any(given is not None for given in (arguments.recipe, arguments.steps, arguments.output, arguments.state)):
            raise ConfigurationError("--compare A B takes two certificates and nothing else")
        return _compare(*arguments.compare)
    if arguments.recipe is None or arguments.output is None:
        raise ConfigurationError("give RECIPE and --output FILE, or --compare A B")
    if arguments.steps is None and arguments.state is None:
        raise ConfigurationError("without --state no step is over: say which --steps A:B to certify")
    check_replaceable(arguments.output)
    steps = None if arguments.steps is None else as_steps(arguments.steps)
    loader = open_run(arguments)
    steps = seen_steps(loader) if steps is None else steps
    certificate = Certificate(steps.start)
    for step in tqdm(steps, unit="step", disable=None):  # None: not where stderr is no terminal
        certificate.record(step, int(certify(loader, range(step, step + 1)).hashes[0]))
    certificate.save(arguments.output)
    print(f"{arguments.output}: {len(certificate)} step(s), {steps.start} … {steps.stop - 1}")
    return 0


def _compare(first: str, second: str) -> int:
    one, other = Certificate.load(first), Certificate.load(second)
    both, differs = one.overlap(other), one.difference(other)
    for path, certificate in ((first, one), (second, other)):
        print(f"{escaped(path)}: steps {certificate.steps.start} … {certificate.steps.stop - 1}")
    if differs is None:
        print(f"the same in all {len(both)} steps that both have, {both.start} … {both.stop - 1}")
        return 0
    print(f"the first step that differs: {differs} (of {both.start} … {both.stop - 1})")
    return 1
