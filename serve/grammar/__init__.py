"""Token masks that make an answer what a request demands: JSON of a schema, a call of a tool."""
