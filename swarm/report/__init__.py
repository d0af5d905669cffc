"""Reports of run folders: numbers, tables and charts."""
