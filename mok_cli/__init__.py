"""The command line of mok: parse, one call into the library, report."""
