"""Find text files and iterate over their documents.

Supported formats are plain text (one document per file), JSON Lines (one per line), Parquet and
Arrow (one per row). Text and JSON Lines can be compressed with gzip or Zstandard.
"""
