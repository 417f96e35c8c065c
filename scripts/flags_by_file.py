"""nvcc's targets by file, where PyTorch's BuildExtension knows one list of flags for all files of an extension."""

from __future__ import annotations

from collections.abc import Callable


def compile_by_file(compile_files: Callable, targets_of: Callable[[str], list[str] | None]) -> Callable:
    """A compiler's method `compile`, calling itself once for all files of the same targets.

    targets_of(source) gives the -gencode flags of a file that has its own, in place of the extension's, or None.
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
                kept = [flag for flag in extra_postargs["nvcc"] if not flag.startswith("-gencode")]
                flags = {**extra_postargs, "nvcc": [*kept, *targets]}
            objects += compile_files(group, *args, extra_postargs=flags, **options)
        return objects

    return compile_groups
