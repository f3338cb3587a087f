//! End-to-end tests of the whole workspace; everything is in `tests/tests`.
