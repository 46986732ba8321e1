"""What the server answers: each endpoint joins the protocol, the text and the engine."""
