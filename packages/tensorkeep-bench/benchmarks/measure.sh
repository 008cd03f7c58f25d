#!/usr/bin/env bash
# Measures the results in results/ again: `packages/tensorkeep-bench/benchmarks/measure.sh FOLDER [NAME...]`.
# FOLDER lies on the disk to measure and keeps reports and plots; what is committed is each results.json, as NAME.json.gz.
# A NAME that has results already is resumed. All of it takes some hours; nothing else may run beside it.
# Training is measured on TEXT, the file of tiny Shakespeare, and left out without it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
shift
mkdir -p "$folder"
cd "$folder"
# By its name alone it stands in the results.
cp "$here/full.json" .

is_wanted() {
	[ "${#wanted[@]}" = 0 ] || printf '%s\n' "${wanted[@]}" | grep -qx -- "$1" || return 1
	echo "$(date +%H:%M:%S) $1"
}

keep() {
	# Files of the folder by their names alone.
	sed "s#$PWD/##g" "$1/results.json" | gzip -n9 >"$here/results/$1.json.gz"
}

run() {
	local name=$1
	shift
	is_wanted "$name" || return 0
	if [ -e "$name/results.json" ]; then
		tensorkeep bench checkpoint --resume --out "$name" >"$name.txt"
	else
		tensorkeep bench checkpoint --out "$name" "$@" >"$name.txt"
	fi
	keep "$name"
}

train() {
	local name=$1 experiment=$2
	shift 2
	is_wanted "$name" || return 0
	tensorkeep bench training --data "$TEXT" --experiment "$experiment" --out "$name" "$@" >"$name.txt"
	keep "$name"
}

wanted=("$@")
part=openllama-3b:first-100
small=openllama-3b:first-5
run a-a-control --experiment peers --arms pytorch --model $part:bfloat16 --runs 10
run peers-bfloat16 --experiment peers --model $part:bfloat16 --runs 5
run peers-float16 --experiment peers --model $part:float16 --runs 3
run six-way-float16 --experiment six-way --model $part:float16 --slow-model $small:float16 --runs 3
run six-way-bfloat16 --experiment six-way --model $part:bfloat16 --slow-model $small:bfloat16 --runs 3
run isolated-float16 --experiment isolated --model $part:float16 --slow-model $small:float16 --runs 3
run isolated-bfloat16 --experiment isolated --model $part:bfloat16 --slow-model $small:bfloat16 --runs 3
run from-baseline-to-tensorkeep --experiment from-baseline-to-tensorkeep --model $small:float16 --runs 3
run claims --experiment claims --runs 5
run full --experiment full.json --model openllama-3b:float16 --runs 3
if [ -n "${TEXT:-}" ]; then
	for each in techniques combinations best-stack training-claims; do train $each-cpu $each; done
	# Those that claim speed on a CPU, so often that 5% can be seen.
	arms=()
	for each in mixed-precision compile cpu-threads attention-matmul fused-optimizer progressive-length; do
		arms+=(--arms "only $each")
	done
	train techniques-speed-cpu techniques "${arms[@]}"
	python "$here/techniques_page.py"
fi
