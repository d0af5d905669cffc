"""Pages of the web application, one module each; each registers its route."""
