"""The command `python -m topr.trajectories`: import, inspect, curate."""

import os
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

from topr.io import ArgumentParser, InputError, check_folder, command
from topr.trajectories.curate import Curation, curate
from topr.trajectories.importing import import_file
from topr.trajectories.rows import resolve_files


def main() -> None:
    parser = ArgumentParser(prog="python -m topr.trajectories", description="Make, inspect, select trajectory files.")
    commands = parser.add_subcommands()
    converter = ArgumentParser(description="Tokenise responses that have rewards, and score log mu.")
    converter.add_argument("source", type=str, help="JSON lines, Parquet, or a hub data set owner/name[/config]:split")
    converter.add_argument("--microbatch-tokens", type=PositiveInt, default=16384, help="tokens of one forward")
    converter.add_function_arguments(import_file, as_group=False, skip={"source", "microbatch_tokens"})
    commands.add_subcommand("import", converter)
    inspector = ArgumentParser(description="Report on trajectory files and show samples.")
    inspector.add_argument("--samples", type=NonNegativeInt, default=1, help="trajectories to show of each sign")
    commands.add_subcommand("inspect", inspector)
    selector = ArgumentParser(description="Select the trajectories to train on.")
    selector.add_class_arguments(Curation, as_group=False, as_positional=True)  # `way` is the one required
    for reader in (inspector, selector):
        reader.add_argument("files", nargs="+", type=str, help="trajectory files, read as one set; globs are welcome")
    selector.add_function_arguments(curate, as_group=False, skip={"files", "curation"})
    commands.add_subcommand("curate", selector)
    with command():
        args = parser.parse_args()
        from topr.trajectories.inspect import report, samples  # after --help: it imports torch and pandas

        options = args[args.subcommand]
        files = [options.source] if args.subcommand == "import" else resolve_files(options.files, args.subcommand)
        if args.subcommand == "inspect":
            print(report(files), *samples(files, options.samples), sep="\n\n")
            return
        if os.path.isdir(options.out or ".") or os.path.realpath(options.out) in map(os.path.realpath, files):
            raise InputError(f"--out {options.out} is a folder or one of the inputs; name a new Parquet file")
        check_folder("--out: the folder", Path(options.out).parent)
        if args.subcommand == "import":
            left_out = import_file(**options.as_dict())
            print(f"{report([options.out])}\nwrote {options.out}; left out as too long: {left_out:,}")
        else:
            curation = Curation(options.way, options.budget, options.share, options.total, options.seed)
            done = curate(files, options.out, curation, options.iteration)
            lines = (f"{name:<14} {value} -> {done['after'][name]}" for name, value in done["before"].items())
            print(*lines, f"wrote {options.out}", sep="\n")


if __name__ == "__main__":
    main()
