"""vLLM's `serve` as a file to run: in its CPU build the `vllm` command does not find its version.

Other than its server module, `serve` starts several API servers.
"""

from __future__ import annotations


def main() -> None:
    """Serve by the arguments of the command line."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()  # type: ignore[no-untyped-call]
    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    args = parser.parse_args()
    validate_parsed_serve_args(args)
    ServeSubcommand.cmd(args)


if __name__ == "__main__":
    main()
