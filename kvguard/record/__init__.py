"""The run record: everything established about one engine start, in one document that can be checked later."""
