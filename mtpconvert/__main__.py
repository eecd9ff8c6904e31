from mtpconvert.cli.main import run

run()
