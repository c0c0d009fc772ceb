"""Wrong things typed: each ends with 2 and one message, with the value, the rule, what to type."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.errors import PREFIX
from spartito.system import IS_LINUX
from tests.skips import skip

MISTAKES = """
trian                                            | has no command 'trian'; Did you mean 'train'?
mnist                                            | has no command 'mnist'; spartito train mnist
own.py                                           | no command 'own.py'; spartito run own.py
nothing.py                                       | no command 'nothing.py'; spartito run nothing.py
--strategy mirrored run own.py                   | has no option --strategy; spartito run --strategy
--versoin                                        | has no option --versoin; Did you mean --version?
--show-completion tcsh                           | 'tcsh' is not a shell; bash, fish, zsh
run                                              | SCRIPT is missing; Example: spartito run
run --strateg mirrored own.py                    | no option --strateg; Did you mean --strategy?
run --wrokers 2 own.py                           | no option --wrokers; Did you mean --workers?
run --epochs 3 own.py                            | no option --epochs; spartito run SCRIPT --epochs
run -x own.py                                    | no option -x
run --workers                                    | --workers needs a value; --workers VALUE
run --workers= own.py                            | is not a whole number; --workers 2
run --workers 0 own.py                           | --workers 0 is less than 1; Give 1 or more
run --workers 1.5 own.py                         | --workers 1.5 is not a whole number
run --workers two own.py                         | --workers two is not a whole number; --workers 2
run nothing.py                                   | no script 'nothing.py'; Did you mean 'own.py'?
run empty                                        | 'empty' is a folder without a __main__.py
run -m no_such_module                            | no module named 'no_such_module'
run ''                                           | the name of the script is empty
run --strategy '' own.py                         | --strategy: expected the name; one_device
run --strategy mirored own.py                    | 'mirored' is not a strategy; mean 'mirrored'?
run --strategy Mirrored own.py                   | 'Mirrored' is not a strategy; mean 'mirrored'?
run --strategy 'mirrored(' own.py                | not the end; It is not complete
run --strategy 'mirrored(1)' own.py              | not '1'; Options have names
run --strategy 'local_sgd(evry=3)' own.py        | no option 'evry'; Did you mean 'every'?
run --strategy mirrored,local_sgd own.py         | ',' after the strategy; One strategy ends here
run --strategy-options '{' own.py                | is not JSON; {"timeout": 60}
run --strategy-options '[1]' own.py              | is not a JSON object; {"timeout": 60}
run --mesh data own.py                           | 'data' is no axis; data=2,model=2
run --mesh data=0 own.py                         | 'data=0' is no axis; data=2,model=2
run --mesh data=2,modle=2 own.py                 | the axis 'modle' of mesh; mean 'model'?
run --mesh pipline=2 own.py                      | the axis 'pipline' of mesh; mean 'pipeline'?
run --stages 2 --strategy mirrored own.py        | has no stages; --strategy pipeline
run --ps 1 --strategy mirrored own.py            | it has no parameter servers; Leave them out
run --chief own.py                               | --chief without --ps; --ps 1
run --min-workers 1 own.py                       | --min-workers 1 without --recover; Add --recover
run --wait abc --recover own.py                  | --wait abc is not a number, more than 0
run --wait -3 --recover own.py                   | --wait -3 is not a number, more than 0; --wait 1
run --restarts -1 own.py                         | --restarts -1 is less than 0
run --notice 0 own.py                            | --notice 0 is not a number, more than 0
run --log-format jsn own.py                      | --log-format jsn is unknown; Did you mean 'json'
run --log-dir own.py own.py                      | own.py cannot be written; Name a folder
run --hosts a --nnodes 2 own.py                  | --hosts and --nnodes exclude each other
run --hosts a,,b own.py                          | the node list 'a,,b' does not parse
run --nnodes 2 own.py                            | needs an address; --master-addr host:29500
run --node-rank 3 own.py                         | --node-rank 3 is out of range; --nnodes 2
run --master-addr nowhere own.py                 | 'nowhere' is not host:port; 10.0.0.1:29500
run --ports 5-3 own.py                           | --ports '5-3' is not a range; 29500-29510
run --slow x own.py                              | --slow 'x' is not a task; worker:1=0.25
run --slow worker:9=0.5 own.py                   | is not a task that starts here; 'worker:0'
run --slow worker:0=2 own.py                     | the fraction 2 is not above 0 and at most 1
run --link fast own.py                           | is not a rate and a delay; 100mbit
run --cpus 2 own.py                              | --cpus without --ray; --ray auto
run --ssh 'ssh -p 1' own.py                      | --ssh without --hosts; --hosts a,b,c
run --env X own.py                               | --env without --hosts
train                                            | RECIPE is missing; spartito train mnist
train mnits                                      | 'mnits' is not a recipe; Did you mean 'mnist'?
train own.py                                     | 'own.py' is not a recipe; spartito run own.py
train mnist extra                                | takes no further words, but got: extra
train mnist --epochs 1.5                         | --epochs 1.5 is not a whole number; --epochs 2
train mnist --epochs 0                           | --epochs 0 is less than 1
train mnist --batch-size 32.0                    | --batch-size 32.0 is not a whole number
train mnist --batchsize 32                       | no option --batchsize; Did you mean --batch-size?
train mnist --precision fp61                     | --precision fp61 is unknown; 'fp16'
train mnist --resume --overwrite                 | exclude each other; Leave one out
train mnist --lr 0.1                             | no option --lr; spartito train --help
train mnist --workers 2 --strategy one_device    | trains in 1 process; Choose mirrored
compare                                          | SCRIPT|RECIPE is missing; spartito compare mnist
compare mnits                                    | neither a script nor a recipe; 'mnist'
compare nothing.py                               | there is no script 'nothing.py'
compare mnist --strategy mirrored                | no option --strategy; Did you mean --strategies?
compare mnist --strategies mirored               | 'mirored' is not a strategy; 'mirrored'
compare mnist --strategies 'mirrored;tpu'        | ';' after a strategy; Write a comma
compare mnist --goal acc                         | is not a figure and its value; val_accuracy=0.95
compare mnist --sweep foo=1,2                    | 'foo=1,2' names no setting; batch_size, workers
compare mnist --sweep workers=a                  | not a list of whole numbers; workers=1,2,4
compare mnist --on k8s                           | neither processes nor compose
compare mnist --cpus 1                           | --cpus is for containers; --on compose
compare mnist --out full                         | --out full is not empty; Name a new folder
compare mnist --slow worker:7=0.5                | is in no run of this; 'worker:1'
plan                                             | neither a script nor a profile; --profile
plan nothing.py                                  | there is no script 'nothing.py'
plan mnist --link fast                           | is not a rate and a delay
plan mnist --memory lots                         | --memory 'lots' is no size; 16GB
plan mnist --goal val_accuracy=0.9               | not what they teach; Give epochs
plan mnist --price abc                           | --price abc is not a number, 0 or more
plan mnist --price -1                            | --price -1 is not a number, 0 or more
plan mnist --fail often                          | does not say how often; 1/day
plan mnist --strategies mirored                  | 'mirored' is not a strategy
plan mnist --check nowhere                       | --check nowhere is no comparison
plan mnist --save-profile nowhere/p.json         | nowhere is no folder; Make it first
plan mnist --save-profile own.py                 | is there already; Name a new file
plan --profile nothing.json                      | --profile nothing.json cannot be read
strategies mirored                               | 'mirored' is not a strategy; 'mirrored'
strategies 'mirrored(foo=1)'                     | mirrored has no option 'foo'
top nowhere                                      | nowhere is no folder; Name the run folder
top empty                                        | no task has written into empty
top empty --listen abc                           | 'abc' is not host:port
report                                           | RUN is missing; spartito report runs/mnist
report empty                                     | is no run folder; run_dir or --out
predict empty cat.jpg                            | empty is no run folder; --out
predict other cat.jpg                            | other is no run folder; --out
predict empty --temperature -1                   | --temperature -1 is not a number, 0 or more
predict empty --length 0                         | --length 0 is less than 1
data chek x                                      | has no command 'chek'; Did you mean 'check'?
data check                                       | URL is missing; spartito data check PetImages
data check nowhere                               | 'nowhere' does not exist
data check empty --remove --move-to x            | exclude each other
data info s4://x                                 | unknown protocol; Did you mean 's3'?
data info empty                                  | has no folders of classes; DIR/cat/1.jpg
data pack empty out --shard-size lots            | 'lots' is not a number of bytes; 200GB
data bench empty --seconds 0                     | --seconds 0 is not a number, more than 0
data get mnits                                   | no data set is called 'mnits'; 'mnist'
data get --to x                                  | --to without a name
checkpoint show nowhere                          | nowhere does not exist; Name a checkpoint
checkpoint show own.py                           | its name ends with .py; .safetensors
checkpoint verify empty                          | empty holds no checkpoint
checkpoint average full/a.pt                     | full/a.pt exists; Name another
cluster compos mnist                             | no command 'compos'; Did you mean 'compose'?
cluster compose nothing.py                       | there is no script 'nothing.py'
cluster compose mnist --cpus x                   | --cpus x is no list of numbers; 0.5,1
cluster compose mnist --memory x                 | is no amount of memory; 2g
cluster compose mnist --name 'A B'               | cannot name containers; small letters
cluster compose mnist -- --out x                 | --out after --; before the --
cluster kubernetes mnist --kind jbo              | is no kind of job; Did you mean 'job'
cluster kubernetes mnist --tpu v9:3              | names no TPU; v5e:4x4
cluster kubernetes mnist --memory lots           | is no quantity; 4Gi
cluster slurm mnist --time x                     | is no time limit; 01:30:00
cluster slurm mnist --array x                    | is no index and no range; 0-9
cluster slurm mnist --nodes 0                    | --nodes 0 is less than 1
cluster compose mnist --hosts a,b --workers 2 --into own.py | --into own.py cannot be made
cluster up nothing.yaml                          | cannot be read; spartito cluster compose
cluster up own.py                                | own.py has no services
cluster image empty                              | empty has no docker/Dockerfile
doctor extra                                     | takes no further words, but got: extra
doctor --timeout -1                              | --timeout -1 is not a number, more than 0
doctor --ps 1                                    | --ps without --hosts; --hosts a,b,c
doctor --compose x --workers 2                   | exclude each other; Give one of them
chaos mnist --faults kil                         | 'kil' is not a fault; Did you mean 'kill'?
chaos mnist --roles wroker                       | 'wroker' is not a role; 'worker'
chaos mnist --schedule foo                       | 'foo' is not a fault; kill@worker:1#40
chaos mnist --schedule kill@worker:9#5           | the job has no worker:9; 'worker:1'
chaos mnist --steps 9-3                          | --steps 9-3 has no steps; 150-200
chaos mnist --minutes x                          | --minutes x is not a number, more than 0
chaos mnist --out own.py                         | --out own.py cannot be made; may write
chaos mnist --longest 3                          | --longest 3 is less than 10
"""
ROWS = [row.rpartition(" | ")[::2] for row in MISTAKES.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    (made / "own.py").write_text("print('mine')\n")
    (made / "empty").mkdir()
    for name in ("full", "other"):
        (made / name).mkdir()
    (made / "other" / "config.json").write_text("[1, 2]")
    (made / "full" / "a.pt").touch()
    return made


@pytest.mark.parametrize(("typed", "said"), ROWS, ids=[row[0].strip() for row in ROWS])
def test_a_mistake_is_one_message_with_what_to_type(
    typed: str,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if typed.split()[0] == "chaos" and not IS_LINUX:
        skip("linux", "spartito chaos says that it needs Linux")
    monkeypatch.chdir(folder)
    before = sorted(os.listdir(folder))
    assert main(shlex.split(typed)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count(PREFIX) == 1
    assert err.startswith(PREFIX)
    for words in said.split("; "):
        assert words.strip() in err
    assert sorted(os.listdir(folder)) == before
