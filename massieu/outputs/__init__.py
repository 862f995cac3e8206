"""Output on disk: folders written whole or not at all, and tables that a spreadsheet opens safely."""
