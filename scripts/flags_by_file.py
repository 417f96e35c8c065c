"""nvcc targets for each file. PyTorch's BuildExtension has one list of flags for all files of an extension."""

from __future__ import annotations

from collections.abc import Callable


def compile_by_file(compile_files: Callable, targets_of: Callable[[str], list[str] | None]) -> Callable:
    """Wraps a compiler's method `compile`: calls it once for each group of files with the same targets.

    targets_of(source) returns the -gencode flags of a file, which replace the extension's, or None to keep those.
    """

    def compile_groups(sources, *args, extra_postargs=None, **options):
        groups: dict[tuple[str, ...] | None, list[str]] = {}
        for source in sources:
            targets = targets_of(source)
            groups.setdefault(None if targets is None else tuple(targets), []).append(source)
        objects = []
        for targets, group in groups.items():
            flags = extra_postargs
            if targets is not None:
                others = [flag for flag in extra_postargs["nvcc"] if not flag.startswith("-gencode")]
                flags = {**extra_postargs, "nvcc": [*others, *targets]}
            objects += compile_files(group, *args, extra_postargs=flags, **options)
        return objects

    return compile_groups
