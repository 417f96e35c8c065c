"""The versions of transformers that the integrations support, and a name that differs between them."""

MIN_TRANSFORMERS, MAX_TRANSFORMERS = "5.17", "5.24"
NEEDS = f"flash_dmattn.integrations.transformers needs transformers {MIN_TRANSFORMERS} to {MAX_TRANSFORMERS}"
INSTALL = 'pip install "transformers>=5.17,<5.25" psutil'

try:
    import transformers
    from packaging.version import Version
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{NEEDS} ({error}): run `{INSTALL}`",
        name=error.name,
    ) from error


def require_version(version: str) -> None:
    if not Version(MIN_TRANSFORMERS).release <= Version(version).release[:2] <= Version(MAX_TRANSFORMERS).release:
        raise ImportError(f"{NEEDS}, got {version}: run `{INSTALL}`")


require_version(transformers.__version__)

# The argument of models and attention modules for the cache of keys and values. Before 5.24 "cache" is that of
# continuous batching only, which models pass on to the attention function.
CACHE = "cache" if Version(transformers.__version__).release >= (5, 24) else "past_key_values"
