"""The auditor's own read path: headers, metadata and records parsed by hand; not through ``stores``, not with torch."""
