"""The families that the Hugging Face half knows, by architecture."""

from __future__ import annotations

from mtpconvert.audit.roles.huggingface_dense import DENSE
from mtpconvert.audit.roles.huggingface_family import Family
from mtpconvert.audit.roles.huggingface_hybrid import HYBRID
from mtpconvert.audit.roles.huggingface_latent import LATENT
from mtpconvert.audit.roles.huggingface_moe import EXPERTS

FAMILIES: dict[str, Family] = {**LATENT, **EXPERTS, **HYBRID, **DENSE}
