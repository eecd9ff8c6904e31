"""Every finding code: its severity, what it says, how to mend it. ``docs/findings.md`` adds why each matters.

Codes are stable: scripts and waivers name them. Never reuse or rename one.
"""

from __future__ import annotations

from typing import NamedTuple


class Code(NamedTuple):
    severity: str  # "error", "warning" or "note"
    what: str
    mend: str


_E, _W, _N = "error", "warning", "note"
_AGAIN = "write the right side again from its source"
_FILES = "download or write the file again"

CODES: dict[str, Code] = {
    # names, shapes, numbers
    "nothing-compared": Code(_E, "no tensor of the two sides could be matched", "compare the example names given"),
    "mass-mismatch": Code(_E, "most names are unknown to the other side", "fix the rename of the writing tool"),
    "tensor-missing": Code(_E, "a tensor of the left is not on the right", _AGAIN),
    "tensor-unexpected": Code(_E, "a tensor of the right is not on the left", "write into an empty folder"),
    "tensor-renamed": Code(_E, "a missing and an unexpected tensor hold equal bytes", "rename it back"),
    "shape-mismatch": Code(_E, "a tensor has another shape on the right", _AGAIN),
    "dtype-changed": Code(_E, "a tensor has another dtype; every value survived", "keep the source's dtype"),
    "widened": Code(_W, "a router's weight is F32, as transformers writes it; every value survived", "nothing to do"),
    "narrowed": Code(_E, "values were rounded to a narrower dtype", "keep this tensor in its own dtype"),
    "bytes-differ": Code(_E, "a tensor has other numbers on the right", "see the place and the cause given"),
    "norm-less-one": Code(_N, "norms kept as w - 1 on one side and as w on the other, rightly", "nothing to do"),
    "copy-differs": Code(_E, "two holders of one meaning are not equal", "write the copy again from its source"),
    "role-unknown": Code(_E, "no meaning is known for a tensor, so it went unaudited", "compare like with like"),
    "role-overlap": Code(_E, "shapes contradict the config: elements claimed twice or not there", "check the config"),
    "architecture-unknown": Code(_E, "the auditor knows no meanings for this architecture", "compare like with like"),
    "config-contradiction": Code(_W, "a config contradicts itself, so its tensors' meanings are unknown", "correct it"),
    "compared-with-itself": Code(_W, "both sides are the same files on disk", "give the path of the other checkpoint"),
    "spelling-mixed": Code(_E, "transformer_layer and mtp_model_layer in one checkpoint", "write it with one version"),
    "segment-repeated": Code(_W, "a name repeats a path segment", "fix the rename table of the writing tool"),
    "expert-set": Code(_E, "the experts of a layer are not numbered 0 to n-1", "gather experts under global numbers"),
    "layer-set": Code(_E, "trunk layers by name disagree with the config's layer count", _AGAIN),
    # MTP
    "mtp-none-found": Code(_E, "MTP is declared and no MTP tensor is there", "graft MTP from the base, or write 0"),
    "mtp-none-published": Code(_N, "MTP is declared, and the family is published without", "nothing to do"),
    "mtp-layer-missing": Code(_E, "a whole MTP layer of the left is absent", "convert with a tool that keeps MTP"),
    "mtp-tensor-missing": Code(_E, "a tensor of an MTP layer is absent on the right", _AGAIN),
    "mtp-tensor-unexpected": Code(_E, "an MTP tensor that the left does not have", "find where it came from"),
    "mtp-layer-incomplete": Code(_E, "an MTP layer lacks tensors its model needs", "take the layer from the base"),
    "mtp-count-mismatch": Code(_E, "a count key and the names disagree", "set the key to the stored layers"),
    "mtp-count-changed": Code(_E, "a count key has another value on the right", "restore the source's value"),
    "mtp-count-null": Code(_W, "a count key is null", "write the number"),
    "mtp-count-type": Code(_E, "a count key is no whole number from 0 on", "write the number, without quotes"),
    "mtp-count-contradiction": Code(_E, "count keys of one config contradict each other", "make them agree"),
    "mtp-undeclared": Code(_W, "MTP tensors that no count key declares", "add the family's count key"),
    "trunk-lost-with-mtp": Code(_E, "trunk tensors lost with the shard of lost MTP tensors", "export with MTP"),
    # files
    "index-ghost": Code(_E, "the index lists a tensor that its file lacks", "rebuild the index from the headers"),
    "index-unlisted": Code(_E, "a file holds a tensor that the index does not list", "rebuild the index"),
    "index-missing-file": Code(_E, "the index names a file that is not there", _FILES),
    "index-total-size": Code(_E, "total_size is not the sum of the tensors", "rebuild the index"),
    "index-no-total-size": Code(_W, "the index has no total_size", "rebuild the index"),
    "index-unreadable": Code(_E, "the index is no JSON object with a weight_map", "rebuild the index"),
    "index-absent": Code(_W, "several weight files and no index", "write an index"),
    "file-stray": Code(_W, "a weight file that the index does not name", "remove it, or list it"),
    "file-truncated": Code(_E, "a file ends before its last tensor", _FILES),
    "file-trailing": Code(_E, "bytes after the last tensor", "write the file again"),
    "file-layout": Code(_E, "holes or overlaps between tensors, or lengths that contradict shapes", _FILES),
    "file-unreadable": Code(_E, "a file has no readable header", _FILES),
    "name-duplicate": Code(_E, "one name twice, in a header or in two files", "remove the stale one from its file"),
    "shard-set-incomplete": Code(_E, "files named ...-of-NNNNN that are not NNNNN many", "remove stale shard sets"),
    "chunk-layout": Code(_E, "chunks of a tensor overlap or leave holes", "save the checkpoint again"),
    "chunk-unreadable": Code(_E, "a chunk's record cannot be read where the metadata says", "save it again"),
    "crc-mismatch": Code(_E, "a record's bytes do not match its stored CRC-32", "copy the file again from its origin"),
    "objects-ignored": Code(_N, "objects other than _extra_state were counted, not compared", "nothing to do"),
    # config and side files
    "config-missing": Code(_E, "no config.json", "copy it from the source"),
    "config-unreadable": Code(_E, "config.json is no JSON object", "copy it from the source"),
    "config-changed": Code(_W, "config keys that change what the numbers mean differ", "restore the source's values"),
    "argument-mismatch": Code(_E, "a Megatron argument contradicts the other side", "set the argument as said"),
    "layer-list-length": Code(_E, "a per-layer list of the config has another length", "cut it to the layers"),
    "vocab-rows": Code(_E, "embedding or head without the rows that the vocabulary calls for", "restore the rows"),
    "vocab-padding": Code(_N, "embedding rows beyond vocab_size", "nothing to do"),
    "padding-nonzero": Code(_W, "padding rows are not zero", "harmless unless the tokens are used"),
    "rows-repeated": Code(_W, "rows of real tokens repeat the row before them", "initialise and train the new tokens"),
    "head-missing": Code(_E, "no output head, and the config does not tie it", "write lm_head, or set the tie flag"),
    "head-tied": Code(_N, "the output head is tied to the embedding", "nothing to do"),
    "dtype-config": Code(_W, "the config's dtype is that of no matrix", "write the dtype stored"),
    "side-file-missing": Code(_E, "a side file of the left is absent", "copy it"),
    "side-file-changed": Code(_W, "a side file has other bytes", "copy it, unless the change is meant"),
    "remote-code-missing": Code(_E, "auto_map names a file that is not there", "copy the module"),
    # quantisation
    "quant-mtp-plain": Code(_E, "the scheme covers MTP modules stored plain", "add the exclude entry given"),
    "quant-plain": Code(_E, "the scheme covers modules stored plain", "add the exclude entry given"),
    "quant-stale-config": Code(_E, "quantization_config and no quantised tensor", "remove the key path given"),
    "quant-undeclared": Code(_E, "quantised tensors and no quantization_config", "restore the config"),
    "quant-excluded-packed": Code(_E, "a module is excluded and stored quantised", "remove the exclude entry"),
    "quant-never-packed": Code(_E, "a module that no engine unpacks is stored quantised", "keep it in plain floats"),
    "scale-missing": Code(_E, "a quantised weight without a scale", "write the scale"),
    "scale-orphan": Code(_E, "a scale without a quantised weight", "remove it, or write the weight"),
    "scale-shape": Code(_E, "a scale tensor that does not fit its weight's blocks", "write the scales again"),
    "scale-invalid": Code(_E, "a scale that is zero, negative or not finite", "quantise the weight again"),
    "other-part": Code(_N, "tensors of another part of the model than Megatron's", "nothing to do"),
    "other-part-missing": Code(_E, "another part that the config wants, and that is kept, is not there", _AGAIN),
    "kept-tensors": Code(_E, "tensors kept for the way back that are not the source's", "convert again"),
    "kept-scales": Code(_E, "scales kept for the way back that are not the source's", "convert again"),
    "quant-no-block-size": Code(_E, "scaled blocks whose size the config does not say", "restore weight_block_size"),
    "dequantised": Code(_W, "codes with scales on one side, their values on the other", "nothing, if it is meant"),
    "requantised": Code(_N, "other codes or scales that stand for equal numbers", "keep the source's bytes"),
    "router-quantised": Code(_E, "a router is stored quantised", "keep routers in plain floats"),
    # between two trainings
    "mtp-stale": Code(_E, "MTP equals the base while the trunk changed", "export the trained MTP"),
    "trunk-stale": Code(_E, "the trunk equals the base while MTP changed", "export the trained trunk, or waive"),
    "nothing-changed": Code(_E, "not one value differs from the base", "this is not a trained checkpoint"),
    "copy-stale": Code(_E, "a copy was left at the base's values", "write the copy again from its source"),
    "values-constant": Code(_E, "a tensor is zero or constant, and was not in the base", "find the lost values"),
    "values-not-finite": Code(_E, "NaN or infinity, and none in the base", "find where training diverged"),
    "fresh-init": Code(_E, "an MTP layer looks freshly initialised", "start again from the base's MTP"),
    "router-bias-zero": Code(_E, "a router correction bias is all zeros", "export the buffers too"),
    # waivers
    "waiver-unused": Code(_E, "a waiver matches no finding", "remove it"),
    "waiver-expired": Code(_E, "a waiver is past its date and no longer waives", "renew or remove it"),
}
