"""The auditor's own read path: headers, metadata and records parsed by hand, never through ``stores``, never with torch."""
