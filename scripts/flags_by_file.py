"""nvcc targets per file, and the order of files. PyTorch's BuildExtension has one list of flags for all files of an
extension, and setuptools sorts them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def compile_by_file(
    compile_files: Callable, targets_of: Callable[[str], list[str] | None], order: Sequence[str] = ()
) -> Callable:
    """Wraps a compiler's method `compile`: one call for all files with the same targets, those in `order` first.

    targets_of(source) returns the -gencode flags that replace the extension's for this file, or None. Calls run one
    after the other, so different targets leave processors idle at the end of each.
    """
    places = {source: place for place, source in enumerate(order)}

    def compile_groups(sources, *args, extra_postargs=None, **options):
        flags = extra_postargs.get("nvcc", [])
        usual = tuple(flag for flag in flags if flag.startswith("-gencode"))
        common = [flag for flag in flags if flag not in usual]
        groups: dict[tuple[str, ...], list[str]] = {}
        for source in sorted(sources, key=lambda source: places.get(source, len(places))):
            groups.setdefault(tuple(targets_of(source) or usual), []).append(source)
        objects = []
        for targets, group in groups.items():
            own = extra_postargs if targets == usual else {**extra_postargs, "nvcc": [*common, *targets]}
            objects += compile_files(group, *args, extra_postargs=own, **options)
        return objects

    return compile_groups
