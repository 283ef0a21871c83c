"""Scripts and notebooks around transformers' Trainer: what is literal is read, the rest is told with its line."""

from __future__ import annotations

import json

import pytest

from fivetune.config import load_config
from fivetune.errors import ConfigError
from fivetune.start.importers import ImportedRecipe, RawConfig
from fivetune.start.importers._python import Computed, PythonSource
from fivetune.start.importers._recipe import format_recipe, import_recipe

SUMMARIES = """
from datasets import load_dataset
raw = load_dataset("billsum", split="ca_test")
raw = raw.train_test_split(test_size=0.2)
checkpoint = "google-t5/t5-small"
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
prefix = "summarize: "
def preprocess_function(examples):
    inputs = [prefix + doc for doc in examples["text"]]
    model_inputs = tokenizer(inputs, max_length=1024, truncation=True)
    labels = tokenizer(text_target=examples["summary"], max_length=128, truncation=True)
    model_inputs["labels"] = labels["input_ids"]
    return model_inputs
tokenized = raw.map(preprocess_function, batched=True)
rouge = evaluate.load("rouge")
def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return rouge.compute(predictions=predictions, references=labels, use_stemmer=True)
model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
training_args = Seq2SeqTrainingArguments(
    output_dir="my_model", eval_strategy="epoch", learning_rate=2e-5, per_device_train_batch_size=16,
    per_device_eval_batch_size=16, weight_decay=0.01, save_total_limit=3, num_train_epochs=4,
    predict_with_generate=True, fp16=True, push_to_hub=True)
trainer = Seq2SeqTrainer(model=model, args=training_args, train_dataset=tokenized["train"],
    eval_dataset=tokenized["test"], processing_class=tokenizer, compute_metrics=compute_metrics)
"""

OLD_NOTEBOOK = """
!pip install datasets transformers
model_checkpoint = "t5-small"
raw_datasets = load_dataset("xsum")
metric = load_metric("rouge")
if model_checkpoint in ["t5-small", "t5-base", "t5-large"]:
    prefix = "summarize: "
else:
    prefix = ""
max_input_length = 1024
max_target_length = 128
tokenizer = AutoTokenizer.from_pretrained(model_checkpoint)
def preprocess_function(examples):
    inputs = [prefix + doc for doc in examples["document"]]
    model_inputs = tokenizer(inputs, max_length=max_input_length, truncation=True)
    with tokenizer.as_target_tokenizer():
        labels = tokenizer(examples["summary"], max_length=max_target_length, truncation=True)
    model_inputs["labels"] = labels["input_ids"]
    return model_inputs
tokenized_datasets = raw_datasets.map(preprocess_function, batched=True)
batch_size = 16
model_name = model_checkpoint.split("/")[-1]
args = Seq2SeqTrainingArguments(f"{model_name}-finetuned-xsum", evaluation_strategy = "epoch", learning_rate=2e-5,
    per_device_train_batch_size=batch_size, num_train_epochs=1)
model = AutoModelForSeq2SeqLM.from_pretrained(model_checkpoint)
trainer = Seq2SeqTrainer(model, args, train_dataset=tokenized_datasets["train"],
    eval_dataset=tokenized_datasets["validation"])
"""

TRANSLATION = """
books = load_dataset("opus_books", "en-fr")
books = books["train"].train_test_split(test_size=0.1)
tokenizer = AutoTokenizer.from_pretrained("google-t5/t5-base")
source_lang = "en"
target_lang = "fr"
prefix = "translate English to French: "
def preprocess(examples):
    inputs = [prefix + example[source_lang] for example in examples["translation"]]
    targets = [example[target_lang] for example in examples["translation"]]
    return tokenizer(inputs, text_target=targets, max_length=128, truncation=True)
tokenized_books = books.map(preprocess, batched=True)
metric = evaluate.load("sacrebleu")
training_args = Seq2SeqTrainingArguments(output_dir="out", learning_rate=1e-4, lr_scheduler_type="cosine",
    optim="adafactor", warmup_ratio=0.05, save_total_limit=1, logging_steps=0.1)
trainer = Seq2SeqTrainer(model=AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-base"), args=training_args,
    train_dataset=tokenized_books["train"], eval_dataset=tokenized_books["test"])
"""

QUESTIONS = """
MODEL = "google/flan-t5-base"
squad = load_dataset("rajpurkar/squad")
tok = T5TokenizerFast.from_pretrained(MODEL)
def preprocess(examples):
    inputs, targets = [], []
    for q, c, a in zip(examples["question"], examples["context"], examples["answers"]):
        inputs.append(f"question: {q.strip()} context: {c}")
        targets.append(a["text"][0])
    enc = tok(inputs, max_length=384, truncation=True, padding="max_length")
    dec = tok(targets, max_length=32, truncation=True, padding="max_length")
    enc["labels"] = [[(t if t != tok.pad_token_id else -100) for t in l] for l in dec["input_ids"]]
    return enc
train = squad["train"].map(preprocess, batched=True)
valid = squad["validation"].map(preprocess, batched=True)
metric = evaluate.load("squad")
model = T5ForConditionalGeneration.from_pretrained(MODEL)
args = Seq2SeqTrainingArguments("qa", generation_max_length=32, generation_num_beams=4, bf16=True, max_steps=1000,
    eval_steps=0.2, report_to="tensorboard", seed=7)
Seq2SeqTrainer(model=model, args=args, train_dataset=train, eval_dataset=valid).train()
"""

LORA = """
from peft import LoraConfig, get_peft_model
model_id = "google/flan-t5-large"
dataset = load_dataset("csv", data_files={"train": "train.csv", "test": "test.csv"})
tokenizer = AutoTokenizer.from_pretrained(model_id)
def preprocess_function(sample, padding="max_length"):
    inputs = ["summarize: " + item for item in sample["dialogue"]]
    model_inputs = tokenizer(inputs, max_length=255, padding=padding, truncation=True)
    labels = tokenizer(text_target=sample["summary"], max_length=50, padding=padding, truncation=True)
    if padding == "max_length":
        labels["input_ids"] = [[(l if l != 0 else -100) for l in label] for label in labels["input_ids"]]
    model_inputs["labels"] = labels["input_ids"]
    return model_inputs
tokenized_dataset = dataset.map(preprocess_function, batched=True, remove_columns=["dialogue", "summary", "id"])
model = AutoModelForSeq2SeqLM.from_pretrained(model_id, load_in_8bit=True, device_map="auto")
lora_config = LoraConfig(r=16, lora_alpha=32, target_modules=["q", "v"], lora_dropout=0.05, bias="none",
    task_type=TaskType.SEQ_2_SEQ_LM)
model = prepare_model_for_int8_training(model)
model = get_peft_model(model, lora_config)
training_args = Seq2SeqTrainingArguments(output_dir="lora", auto_find_batch_size=True, learning_rate=1e-3,
    num_train_epochs=5, logging_dir="lora/logs", logging_strategy="steps", logging_steps=500, save_strategy="no",
    report_to="tensorboard")
trainer = Seq2SeqTrainer(model=model, args=training_args, train_dataset=tokenized_dataset["train"])
model.config.use_cache = False
"""

SQL = """
import pandas as pd
from sklearn.model_selection import train_test_split
df = pd.read_csv("data/sql.csv", sep="\\t")
df = df.rename(columns={"query": "sql"})
df["prompt"] = "translate English to SQL: " + df["question"]
df = df.dropna()
train_df, val_df = train_test_split(df, test_size=0.15, random_state=42)
train_ds = Dataset.from_pandas(train_df)
val_ds = Dataset.from_pandas(val_df)
tokenizer = T5Tokenizer.from_pretrained("t5-base")
def tokenize(batch):
    x = tokenizer(batch["prompt"], padding="max_length", truncation=True, max_length=64)
    y = tokenizer(batch["sql"], padding="max_length", truncation=True, max_length=96)
    x["labels"] = y["input_ids"]
    return x
train_ds = train_ds.map(tokenize, batched=True)
val_ds = val_ds.map(tokenize, batched=True)
args = TrainingArguments(output_dir="./t5-sql", evaluation_strategy="steps", eval_steps=500, learning_rate=5e-5,
    per_device_train_batch_size=8, gradient_accumulation_steps=4, num_train_epochs=3, load_best_model_at_end=True,
    metric_for_best_model="eval_loss", gradient_checkpointing=True, weird_option=3)
trainer = Trainer(model=T5ForConditionalGeneration.from_pretrained("t5-base"), args=args, train_dataset=train_ds,
    eval_dataset=val_ds, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])
"""

ARGPARSE = """
import argparse
def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-name", type=str, default="google/mt5-small")
    parser.add_argument("--lr", "-l", type=float, default=3e-4)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--train_path", required=True)
    parser.add_argument("--val_path", default="val.jsonl")
    parser.add_argument("--max_len", type=int, default=256)
    parser.add_argument("--fp16", action="store_true")
    args = parser.parse_args()
    return args
def main(args):
    data = load_dataset("json", data_files={"train": args.train_path, "validation": args.val_path})
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    def encode(example):
        source = tokenizer("headline: " + example["body"], truncation=True, max_length=args.max_len)
        target = tokenizer(example["headline"], truncation=True, max_length=32)
        return {"input_ids": source.input_ids, "labels": target.input_ids}
    data = data.map(encode)
    training_args = Seq2SeqTrainingArguments(output_dir="out", per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr, fp16=args.fp16, num_train_epochs=2)
    model = MT5ForConditionalGeneration.from_pretrained(args.model_name)
    Seq2SeqTrainer(model=model, args=training_args, train_dataset=data["train"],
        eval_dataset=data["validation"]).train()
if __name__ == "__main__":
    main(parse_args())
"""

DATACLASSES = """
@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="google-t5/t5-small", metadata={"help": "path"})
@dataclass
class DataArguments:
    train_file: str = field(default="a.jsonl")
    max_source: int = 300
parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
model_args, data_args, training_args = parser.parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path)
ds = load_dataset("json", data_files=data_args.train_file, split="train")
def f(batch):
    x = tokenizer(batch["source"], max_length=data_args.max_source, truncation=True)
    x["labels"] = tokenizer(batch["target"], max_length=64, truncation=True).input_ids
    return x
trainer = Seq2SeqTrainer(model=model, args=training_args, train_dataset=ds.map(f, batched=True))
"""

CUSTOM_DATASET = """
class SummaryDataset(Dataset):
    def __init__(self, dataframe, tokenizer, source_len, summ_len):
        self.tokenizer = tokenizer
        self.data = dataframe
        self.source_len = source_len
        self.summ_len = summ_len
        self.text = self.data.text
        self.ctext = self.data.ctext
    def __len__(self):
        return len(self.text)
    def __getitem__(self, index):
        ctext = str(self.ctext[index])
        ctext = ' '.join(ctext.split())
        text = str(self.text[index])
        text = ' '.join(text.split())
        source = self.tokenizer.batch_encode_plus([ctext], max_length=self.source_len, padding='max_length',
            return_tensors='pt')
        target = self.tokenizer.batch_encode_plus([text], max_length=self.summ_len, padding='max_length',
            return_tensors='pt')
        return {'source_ids': source['input_ids'].squeeze(), 'target_ids': target['input_ids'].squeeze()}
class Config:
    TRAIN_BATCH_SIZE = 2
    TRAIN_EPOCHS = 2
    LEARNING_RATE = 1e-4
    MAX_LEN = 512
    SUMMARY_LEN = 150
config = Config()
def train(epoch, tokenizer, model, device, loader, optimizer):
    model.train()
def main():
    tokenizer = T5Tokenizer.from_pretrained("t5-base")
    df = pd.read_csv('./data/news.csv', encoding='latin-1')
    df = df[['text', 'ctext']]
    df.ctext = 'summarize: ' + df.ctext
    train_dataset = df.sample(frac=0.8, random_state=42)
    val_dataset = df.drop(train_dataset.index).reset_index(drop=True)
    train_dataset = train_dataset.reset_index(drop=True)
    training_set = SummaryDataset(train_dataset, tokenizer, config.MAX_LEN, config.SUMMARY_LEN)
    val_set = SummaryDataset(val_dataset, tokenizer, config.MAX_LEN, config.SUMMARY_LEN)
    training_loader = DataLoader(training_set, batch_size=config.TRAIN_BATCH_SIZE, shuffle=True)
    model = T5ForConditionalGeneration.from_pretrained("t5-base")
    optimizer = torch.optim.Adam(params=model.parameters(), lr=config.LEARNING_RATE)
    for epoch in range(config.TRAIN_EPOCHS):
        train(epoch, tokenizer, model, "cpu", training_loader, optimizer)
"""

LIGHTNING = """
class QADataset(Dataset):
    def __init__(self, data, tokenizer, source_max=396, target_max=32):
        self.data, self.tokenizer = data, tokenizer
        self.source_max = source_max
        self.target_max = target_max
    def __getitem__(self, index):
        data_row = self.data.iloc[index]
        source_encoding = self.tokenizer(data_row["question"], data_row["context"], max_length=self.source_max,
            truncation="only_second", return_tensors="pt")
        target_encoding = self.tokenizer(data_row["answer_text"], max_length=self.target_max, return_tensors="pt")
        return dict(input_ids=source_encoding["input_ids"], labels=target_encoding["input_ids"])
class T5FineTuner(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = T5ForConditionalGeneration.from_pretrained(MODEL_NAME, return_dict=True)
    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return AdamW(self.parameters(), lr=0.0001)
MODEL_NAME = "t5-base"
tokenizer = T5Tokenizer.from_pretrained(MODEL_NAME)
df = pd.read_json("qa.json")
train_df, val_df = train_test_split(df, test_size=0.05)
module = QADataModule(QADataset(train_df, tokenizer), QADataset(val_df, tokenizer), batch_size=4)
early = EarlyStopping(monitor="val_loss", patience=4)
trainer = pl.Trainer(callbacks=[early], max_epochs=6, gpus=1, precision=16, accumulate_grad_batches=2,
    gradient_clip_val=1.0, enable_progress_bar=True)
trainer.fit(T5FineTuner(), module)
ids = model.generate(input_ids=x, num_beams=2, max_length=80, repetition_penalty=2.5, early_stopping=True)
"""

TABLE = """
CONFIG = {"model": "google/flan-t5-small", "lr": 1e-4, "epochs": 2, "train": {"batch": 4}}
common = dict(learning_rate=CONFIG["lr"], num_train_epochs=CONFIG["epochs"], optim="paged_adamw_32bit")
OUT = Path("runs") / "flan"
args = Seq2SeqTrainingArguments(output_dir=str(OUT), per_device_train_batch_size=CONFIG["train"]["batch"] * 2,
    generation_config=None, lr_scheduler_type="polynomial", **common)
args.warmup_steps = 100
args.label_smoothing_factor = 0.1
ds = load_dataset("text", data_files=os.path.join("data", "x.txt"))
tokenizer = AutoTokenizer.from_pretrained(CONFIG["model"])
tokenizer.add_tokens(["<", "{"])
model = AutoModelForSeq2SeqLM.from_pretrained(CONFIG["model"])
model.resize_token_embeddings(len(tokenizer))
model.config.dropout_rate = 0.2
for p in model.get_encoder().parameters():
    p.requires_grad = False
class WeightedTrainer(Seq2SeqTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss
WeightedTrainer(model=model, args=args, train_dataset=ds["train"]).train()
"""

RENAMED = """
df = pd.read_csv("t.csv")
df = df.rename(columns={"headlines": "target_text", "text": "source_text"})
df = df[["source_text", "target_text"]]
df["source_text"] = "summarize: " + df["source_text"]
ds = Dataset.from_pandas(df).train_test_split(test_size=0.2, seed=1)
tokenizer = AutoTokenizer.from_pretrained("t5-base")
ds = ds.map(lambda b: tokenizer(b["source_text"], text_target=b["target_text"], max_length=200, truncation=True))
args = Seq2SeqTrainingArguments(output_dir="x", per_device_train_batch_size=8)
trainer = Seq2SeqTrainer(model=AutoModelForSeq2SeqLM.from_pretrained("t5-base"), args=args, train_dataset=ds["train"],
    eval_dataset=ds["test"])
"""

FLAN_MAP = """
ds = load_dataset("knkarthick/dialogsum", split="train[:90%]")
start, end = "Summarize the following conversation.\\n\\n", "\\n\\nSummary: "
tokenizer = AutoTokenizer.from_pretrained("google/flan-t5-base")
def tokenize_function(example):
    prompt = [start + dialogue + end for dialogue in example["dialogue"]]
    example["input_ids"] = tokenizer(prompt, padding="max_length", truncation=True, return_tensors="pt").input_ids
    example["labels"] = tokenizer(example["summary"], padding="max_length", return_tensors="pt").input_ids
    return example
tokenized = ds.map(tokenize_function, batched=True)
tokenized = tokenized.filter(lambda example, index: index % 100 == 0, with_indices=True)
training_args = TrainingArguments(output_dir="./d", learning_rate=1e-5, num_train_epochs=1, max_steps=-1)
trainer = Trainer(model=AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-base", torch_dtype=torch.bfloat16),
    args=training_args, train_dataset=tokenized)
"""

SENTIMENT = """
LABELS = {0: "negative", 1: "positive"}
data = load_dataset("parquet", data_files={"train": ["a.parquet", "b.parquet"], "test": "t.parquet"})
checkpoint = os.environ.get("MODEL", "t5-small")
tokenizer = AutoTokenizer.from_pretrained("t5-small")
def add_text(example):
    example["target"] = LABELS[example["label"]]
    example["source"] = "sst2 sentence: {}".format(example["sentence"])
    return example
def encode(batch):
    source = tokenizer.batch_encode_plus(batch["source"], max_length=128)
    target = tokenizer.batch_encode_plus(batch["target"], max_length=4)
    return {"input_ids": source["input_ids"], "labels": target["input_ids"]}
data = data.map(add_text).map(encode, batched=True)
args = Seq2SeqTrainingArguments(output_dir=os.path.join("runs", "sst2"), learning_rate=3e-4 if True else 1e-4)
trainer = Seq2SeqTrainer(model=T5ForConditionalGeneration.from_pretrained(checkpoint), args=args,
    train_dataset=data["train"], eval_dataset=data["test"], compute_metrics=lambda p: accuracy_score(p[0], p[1]))
"""

INIT = """
def model_init():
    return T5ForConditionalGeneration.from_pretrained("t5-small")
def run(lr, epochs=3, name="t5-small"):
    args = Seq2SeqTrainingArguments(output_dir="x", learning_rate=lr, num_train_epochs=epochs,
        lr_scheduler_type=SchedulerType.COSINE, seed=random.randint(0, 9))
    trainer = Seq2SeqTrainer(model_init=model_init, args=args, train_dataset=make(), eval_dataset=None)
run(2e-4, epochs=7)
"""

CASES = {
    "summaries": (
        SUMMARIES,
        {
            "model.path": "google-t5/t5-small", "task.inputs": "summarize: {text}", "task.targets": "{summary}",
            "data.max_input_tokens": 1024, "data.max_target_tokens": 128, "optimizer.lr": 2e-5,
            "train.num_epochs": 4, "train.batch_size": 16, "data.eval_share": 0.2, "checkpoint.keep": 3,
            "task.main_metric": "rougeLsum_f1", "run.dir": "my_model", "data.train": "FiscalNote/billsum::ca_test",
        },
        ("eval_strategy epoch", "fp16", "push_to_hub"),
    ),
    "old_notebook": (
        OLD_NOTEBOOK,
        {
            "model.path": "t5-small", "data.train": "EdinburghNLP/xsum::train", "run.dir": "t5-small-finetuned-xsum",
            "data.eval": "EdinburghNLP/xsum::validation", "task.inputs": "summarize: {document}",
            "data.max_target_tokens": 128, "train.batch_size": 16,
        },
        ("evaluation_strategy",),
    ),
    "translation": (
        TRANSLATION,
        {
            "task.inputs": "translate English to French: {en}", "task.targets": "{fr}",
            "data.columns": {"en": "translation.en", "fr": "translation.fr"}, "optimizer.name": "adafactor",
            "optimizer.preset": "hf", "schedule.name": "cosine", "schedule.warmup_fraction": 0.05,
            "data.eval_share": 0.1, "data.max_input_tokens": 128, "data.max_target_tokens": 128,
        },
        ("save_total_limit 1", "logging_steps 0.1"),
    ),
    "questions": (
        QUESTIONS,
        {
            "model.path": "google/flan-t5-base", "data.train": "rajpurkar/squad::train", "run.seed": 7,
            "task.inputs": "question: {question} context: {context}", "task.targets": "{text}",
            "data.columns": {"text": "answers.text"}, "eval.every_steps": 200, "eval.num_beams": 4,
            "eval.max_new_tokens": 32, "train.precision": "bf16", "data.max_input_tokens": 384,
            "data.max_target_tokens": 32, "train.num_steps": 1000, "task.main_metric": "f1",
        },
        (),
    ),
    "lora": (
        LORA,
        {
            "model.adapter.name": "qlora", "model.adapter.r": 16, "model.adapter.alpha": 32, "data.eval": None,
            "model.adapter.dropout": 0.05, "model.adapter.target_modules": ["q", "v"], "data.train": "train.csv",
            "task.inputs": "summarize: {dialogue}", "data.max_target_tokens": 50, "train.batch_size": "auto",
        },
        ("save_strategy no",),
    ),
    "sql": (
        SQL,
        {
            "data.train": "data/sql.csv", "data.eval_share": 0.15, "task.targets": "{query}",
            "task.inputs": "translate English to SQL: {question}", "data.max_input_tokens": 64,
            "data.max_target_tokens": 96, "train.global_batch_size": 32, "train.early_stopping.patience": 2,
            "train.recompute": True, "eval.every_steps": 500,
        },
        ("df.dropna()", "metric_for_best_model eval_loss", "weird_option 3"),
    ),
    "argparse": (
        ARGPARSE,
        {
            "model.path": "google/mt5-small", "optimizer.lr": 3e-4, "train.batch_size": 4, "data.eval": "val.jsonl",
            "data.max_input_tokens": 256, "task.inputs": "headline: {body}", "task.targets": "{headline}",
            "data.max_target_tokens": 32,
        },
        ("train_dataset",),
    ),
    "dataclasses": (
        DATACLASSES,
        {
            "model.path": "google-t5/t5-small", "data.train": "a.jsonl", "data.max_input_tokens": 300,
            "task.inputs": "{source}", "task.targets": "{target}", "data.max_target_tokens": 64,
        },
        ("HfArgumentParser",),
    ),
    "custom_dataset": (
        CUSTOM_DATASET,
        {
            "model.path": "t5-base", "data.train": "./data/news.csv", "data.eval_share": 0.2, "train.num_epochs": 2,
            "task.inputs": "summarize: {ctext}", "task.targets": "{text}", "data.max_input_tokens": 512,
            "data.max_target_tokens": 150, "optimizer.lr": 1e-4, "train.batch_size": 2,
        },
        (),
    ),
    "lightning": (
        LIGHTNING,
        {
            "model.path": "t5-base", "data.train": "qa.json", "data.eval_share": 0.05, "train.num_epochs": 6,
            "task.inputs": "{question} {context}", "task.targets": "{answer_text}", "data.max_input_tokens": 396,
            "data.max_target_tokens": 32, "train.early_stopping.patience": 4, "optimizer.lr": 1e-4,
            "train.global_batch_size": 8, "eval.num_beams": 2, "eval.max_new_tokens": 80,
            "eval.repetition_penalty": 2.5,
        },
        ("Lightning: precision 16", "enable_progress_bar"),
    ),
    "table": (
        TABLE,
        {
            "model.path": "google/flan-t5-small", "optimizer.lr": 1e-4, "train.batch_size": 8, "run.dir": "runs/flan",
            "schedule.warmup_steps": 100, "loss.label_smoothing": 0.1, "model.freeze": ["encoder"],
            "train.num_epochs": 2, "schedule.name": "linear", "optimizer.name": "adamw", "data.train": "data/x.txt",
        },
        ("tokenizer.add_tokens", "resize_token_embeddings", "dropout_rate", "class WeightedTrainer", "inputs"),
    ),
    "renamed": (
        RENAMED,
        {
            "task.inputs": "summarize: {text}", "task.targets": "{headlines}", "data.train": "t.csv",
            "data.eval_share": 0.2, "data.max_input_tokens": 200, "data.max_target_tokens": 200,
        },
        (),
    ),
    "flan_map": (
        FLAN_MAP,
        {
            "model.path": "google/flan-t5-base", "data.train": "knkarthick/dialogsum::train",
            "task.inputs": "Summarize the following conversation.\n\n{dialogue}\n\nSummary: ",
            "task.targets": "{summary}", "optimizer.lr": 1e-5, "train.num_epochs": 1,
        },
        ("tokenized.filter", "train[:90%]"),
    ),
    "sentiment": (
        SENTIMENT,
        {
            "task.inputs": "sst2 sentence: {sentence}", "data.train": ["a.parquet", "b.parquet"],
            "model.path": "t5-small",
            "data.eval": "t.parquet", "task.main_metric": "exact_match", "optimizer.lr": 3e-4,
            "run.dir": "runs/sst2", "data.max_target_tokens": 4,
        },
        ("data.map(add_text)",),
    ),
    "init": (
        INIT,
        {"model.path": "t5-small", "optimizer.lr": 2e-4, "train.num_epochs": 7, "schedule.name": "cosine"},
        ("seed", "train_dataset"),
    ),
}  # fmt: skip


def convert(text: str, name: str = "a.py", **overrides: object) -> ImportedRecipe:
    return import_recipe(RawConfig(name, text), None, overrides)


@pytest.mark.parametrize("name", CASES)
def test_scripts_of_each_kind(tmp_path, name):
    text, expected, told = CASES[name]
    is_notebook = "!pip" in text
    if is_notebook:
        text = json.dumps({"cells": [{"cell_type": "code", "source": text.splitlines(keepends=True)}]})
    recipe = convert(text, "a.ipynb" if is_notebook else "a.py")
    found = {key: recipe.settings.get(key) for key in expected}
    assert found == expected
    left_out = [one.argument for one in recipe.findings if one.state in ("left out", "unknown")]
    missing = [part for part in told if not any(part in argument for argument in left_out)]
    assert not missing, left_out
    (tmp_path / "r.yaml").write_text(format_recipe(recipe), encoding="utf-8")
    load_config(tmp_path / "r.yaml")


def test_a_command_line_gives_the_options_of_a_script(tmp_path):
    (tmp_path / "train.py").write_text(ARGPARSE, encoding="utf-8")
    text = "torchrun --nproc_per_node 2 train.py --lr 1e-3 --fp16 --train_path t.jsonl --model-name google/byt5-small"
    settings = convert(text, str(tmp_path / "a.sh")).settings
    assert (settings["model.path"], settings["optimizer.lr"]) == ("google/byt5-small", 1e-3)
    assert (settings["data.train"], settings["train.global_batch_size"]) == ("t.jsonl", 8)
    (tmp_path / "own.py").write_text(DATACLASSES, encoding="utf-8")
    text = "python own.py --model_name_or_path m --learning_rate 2e-4 --train_file b.jsonl --num_train_epochs 9"
    settings = convert(text, str(tmp_path / "b.sh")).settings
    assert (settings["model.path"], settings["optimizer.lr"], settings["data.train"]) == ("m", 2e-4, "b.jsonl")
    assert settings["train.num_epochs"] == 9


def test_tables_without_a_header_and_end_tokens_of_old_tutorials():
    recipe = convert(
        "df = pd.read_csv('q.csv', delimiter='|', names=['question', 'answer'])\n"
        "m = T5ForConditionalGeneration.from_pretrained('t5-small')\n"
        "def encode(row):\n"
        "    a = tokenizer('answer: ' + row['question'] + ' </s>', max_length=9)\n"
        "    a['labels'] = tokenizer(row['answer'] + ' </s>', max_length=5)['input_ids']\n"
        "    return a\n"
        "Trainer(model=m, args=TrainingArguments('o'), train_dataset=Dataset.from_pandas(df).map(encode))\n"
    )
    settings = recipe.settings
    assert (settings["data.header"], settings["task.inputs"]) == (["question", "answer"], "answer: {question}")
    assert (settings["task.targets"], settings["data.max_target_tokens"]) == ("{answer}", 5)


def test_what_code_builds_wins_over_arguments_and_the_rest_is_reported():
    recipe = convert(
        "m = T5ForConditionalGeneration.from_pretrained('t5-small')\n"
        "args = Seq2SeqTrainingArguments('o', learning_rate=1e-5, lr_scheduler_type='cosine', warmup_steps=3)\n"
        "args.warmup_steps = 9\n"
        "optimizer = Adafactor(m.parameters(), lr=1e-3, relative_step=False)\n"
        "schedule = get_constant_schedule(optimizer)\n"
        "def collate(rows): return rows\n"
        "def score(p): return {'my': 1}\n"
        "Seq2SeqTrainer(model=m, args=args, optimizers=(optimizer, schedule), data_collator=collate,\n"
        "    compute_metrics=score, train_dataset=load_dataset('csv', data_files='a.csv', split='train'))\n"
    )
    settings = recipe.settings
    assert (settings["optimizer.name"], settings["optimizer.lr"]) == ("adafactor", 1e-3)
    assert (settings["schedule.name"], settings["schedule.warmup_steps"]) == ("constant", 9)
    left_out = " ".join(one.argument for one in recipe.findings if one.state == "left out")
    assert "collate (line 8)" in left_out and "score (line 9)" in left_out


TUTORIAL = """
dataset = load_dataset("samsum")
tokenizer = AutoTokenizer.from_pretrained("google/flan-t5-base")
lengths = dataset["train"].map(lambda x: tokenizer(x["dialogue"], truncation=True), batched=True)
def preprocess_function(sample):
    inputs = ["summarize: " + item for item in sample["dialogue"]]
    model_inputs = tokenizer(inputs, max_length=500, truncation=True)
    model_inputs["labels"] = tokenizer(text_target=sample["summary"], max_length=90)["input_ids"]
    return model_inputs
data = dataset.map(preprocess_function)
args = Seq2SeqTrainingArguments("o")
model = AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-base")
"""


def test_a_text_that_only_counts_tokens_is_not_the_input():
    recipe = convert(f"{TUTORIAL}Seq2SeqTrainer(model=model, args=args, train_dataset=data['train'])")
    settings = recipe.settings
    assert (settings["task.inputs"], settings["task.targets"]) == ("summarize: {dialogue}", "{summary}")
    assert (settings["data.max_input_tokens"], settings["data.max_target_tokens"]) == (500, 90)


def test_another_text_of_the_same_role_is_told():
    recipe = convert(
        "m = T5ForConditionalGeneration.from_pretrained('t5-small')\n"
        "df = pd.read_csv('t.csv')\n"
        "inputs = tokenizer('a: ' + df['x'])\n"
        "labels = tokenizer(df['y'])\n"
        "other_labels = tokenizer(df['z'])\n"
        "Trainer(m, TrainingArguments('o'), None, df)\n"
    )
    assert (recipe.settings["task.targets"], recipe.settings["data.train"]) == ("{y}", "t.csv")
    assert any("df['z'] (line 5)" in one.argument and one.state == "left out" for one in recipe.findings)


@pytest.mark.parametrize(
    ("loop", "epochs"), [("range(1, N + 1)", 4), ("tqdm(range(N))", 4), ("trange(5)", 5), ("range(start(), 9)", None)]
)
def test_epochs_of_a_loop_are_its_steps(loop, epochs):
    recipe = convert(
        f"N = 4\nm = T5ForConditionalGeneration.from_pretrained('t5-small')\nfor epoch in {loop}:\n    f()\n"
    )
    assert recipe.settings.get("train.num_epochs") == epochs


def test_the_trainer_of_transformers_is_not_that_of_lightning():
    text = (
        "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "m = T5ForConditionalGeneration.from_pretrained('t5-small')\n"
        "Trainer(model=m, args=args, train_dataset=load_dataset('csv', data_files='a.csv', split='train')).train()\n"
    )
    recipe = convert(text)
    assert recipe.settings["model.path"] == "t5-small"
    assert not any(one.state == "unknown" for one in recipe.findings)


def test_changes_in_one_line_are_taken_in_their_order():
    recipe = convert(
        "m = T5ForConditionalGeneration.from_pretrained('t5-small')\n"
        "d = load_dataset('csv', data_files='a.csv', split='train')\n"
        "d = d.rename_column('a', 'b').rename_column('b', 'c').rename_columns({'d': 'e'})\n"
        "d = d.map(lambda r: tokenizer('x: ' + r['c'], text_target=r['e']))\n"
        "Trainer(model=m, args=TrainingArguments('-'.join(['o', 'p'])), train_dataset=d)\n"
    )
    settings = recipe.settings
    assert (settings["task.inputs"], settings["task.targets"], settings["run.dir"]) == ("x: {a}", "{d}", "o-p")


def test_long_values_are_not_built():
    python = PythonSource(RawConfig("a.py", "f('a' * 10**12, [0] * 10**12, 9**9**9)"))
    assert all(isinstance(python.read_value(one), Computed) for one in python.find_calls("f")[0].args)


def test_a_script_whose_values_are_computed_names_them():
    with pytest.raises(ConfigError, match=r"names no model: model pick\(\) \(line 1\)\. Add --model\.path"):
        convert("m = T5ForConditionalGeneration.from_pretrained(pick())\nTrainer(model=m, args=TrainingArguments('o'))")


def test_expressions_that_depend_on_themselves_end():
    python = PythonSource(RawConfig("a.py", "a = b\nb = a\ndef f(x):\n    return f(x) + f(x)\nc = f(1)\ng(a, b, c)\n"))
    call = python.find_calls("g")[0]
    assert all(isinstance(python.read_value(one), Computed) for one in call.args)


def test_columns_that_a_data_frame_makes_are_those_of_the_file():
    recipe = convert(
        "df = pd.read_csv('t.csv')\n"
        "df['prefix'] = 'ask a question'\n"
        "df = df.rename(columns={'question': 'target_text'})\n"
        "df['input_text'] = df['answer'] + ' </s> ' + df['context']\n"
        "df = df[df['context'] != '']\n"
        "df['length'] = df['context'].apply(len)\n"
        "model = T5Model('t5', 't5-small', args={'num_train_epochs': 1})\n"
        "model.train_model(df)\n"
    )
    settings = recipe.settings
    assert settings["task.inputs"] == "ask a question: {answer} </s> {context}"
    assert settings["task.targets"] == "{question}"
    assert any("length" in one.argument and one.state == "left out" for one in recipe.findings)


LOAD = "model = T5ForConditionalGeneration.from_pretrained('t5-small')\n"


def list_left_out(recipe: ImportedRecipe) -> dict[str, str]:
    return {one.argument: one.reason for one in recipe.findings if one.state == "left out"}


def convert_cells(*cells: str) -> ImportedRecipe:
    code = [{"cell_type": "code", "source": text.splitlines(keepends=True)} for text in cells]
    return convert(json.dumps({"cells": code}), "a.ipynb")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("for epoch in range(2):\n    f()\n", "PyTorch loop"),
        ("class M(pl.LightningModule): pass\n", "Lightning"),
        ("t = pl.Trainer(max_epochs=2)\nt.fit(m)\n", "Lightning"),
        ("Trainer(model=model, args=TrainingArguments('o'))\n", "transformers' Trainer"),
        ("Seq2SeqTrainer(model=model)\n", "transformers' Seq2SeqTrainer"),
        ("other = TFAutoModelForSeq2SeqLM.from_pretrained('t5-base')\n", "TensorFlow/Keras"),
    ],
)
def test_the_heading_says_what_trains(code, kind):
    assert kind in convert(LOAD + code).origin


def test_a_loop_has_no_defaults_of_the_trainer():
    """It had a linear schedule, a ROUGE that nothing computes, and lengths were lost without a word."""
    recipe = convert(
        f"{LOAD}config.MAX_LEN = 512\nSUMMARY_LEN = 150\nVAL_EPOCHS = 1\nconfig.LEARNING_RATE = 1e-4\n"
        "torch.manual_seed(7)\noptimizer = torch.optim.Adam(model.parameters(), lr=config.LEARNING_RATE)\n"
        "for epoch in range(2):\n    f()\n"
    )
    settings = recipe.settings
    assert (settings["schedule.name"], settings["run.seed"], settings["optimizer.lr"]) == ("constant", 7, 1e-4)
    assert settings["train.max_grad_norm"] is None
    assert not settings.keys() & {"task.metrics", "task.main_metric", "train.batch_size"}
    left_out = list_left_out(recipe)
    assert {"config.MAX_LEN = 512 (line 2)", "SUMMARY_LEN = 150 (line 3)", "metrics", "batch size"} <= left_out.keys()
    assert not any("EPOCHS" in name or "RATE" in name for name in left_out)


@pytest.mark.parametrize(
    ("call", "name", "warmup"),
    [
        ("get_scheduler('cosine', optimizer=o, num_warmup_steps=9)", "cosine", 9),
        ("get_scheduler(name='constant_with_warmup', num_warmup_steps=9)", "constant", 9),
        ("torch.optim.lr_scheduler.StepLR(o, 3)", "constant", None),
    ],
)
def test_schedules_of_a_loop(call, name, warmup):
    recipe = convert(f"{LOAD}s = {call}\nclip_grad_norm_(model.parameters(), 0.5)\n")
    settings = recipe.settings
    assert (settings["schedule.name"], settings.get("schedule.warmup_steps")) == (name, warmup)
    assert settings["train.max_grad_norm"] == 0.5
    assert any("StepLR" in one for one in list_left_out(recipe)) == ("StepLR" in call)


@pytest.mark.parametrize("before", ["'''\nargs = 1\n'''\n", "from c import args\n"])
def test_arguments_that_are_not_defined_are_told(before):
    recipe = convert(f"{before}EPOCHS = 1\n{LOAD}Seq2SeqTrainer(model=model, args=args)\n")
    left_out = list_left_out(recipe)
    [reason] = [reason for name, reason in left_out.items() if name.startswith("args=args (line ")]
    assert reason.startswith("is not defined")
    assert any(name.startswith("EPOCHS = 1") for name in left_out)
    assert recipe.settings["train.num_epochs"] == 3


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("'adam'", ("adamw", 1e-3, "constant")),
        ("tf.keras.optimizers.Adam(3e-4)", ("adamw", 3e-4, "constant")),
        ("AdamWeightDecay(learning_rate=2e-5, weight_decay_rate=0.01)", ("adamw", 2e-5, "constant")),
        ("create_optimizer(init_lr=2e-5, num_train_steps=9, num_warmup_steps=0)[0]", ("adamw", 2e-5, "linear")),
    ],
)
def test_keras_scripts_are_read(optimizer, expected):
    recipe = convert(
        "model = TFAutoModelForSeq2SeqLM.from_pretrained('t5-small')\n"
        "train = data.to_tf_dataset(columns=['input_ids'], batch_size=2)\n"
        f"model.compile(optimizer={optimizer})\nmodel.fit(train, epochs=4)\n"
    )
    settings = recipe.settings
    assert (settings["optimizer.name"], settings["optimizer.lr"], settings["schedule.name"]) == expected
    assert (settings["model.path"], settings["train.num_epochs"], settings["train.batch_size"]) == ("t5-small", 4, 2)
    assert any("model.fit" in name for name in list_left_out(recipe))


@pytest.mark.parametrize(
    "cell",
    [
        "pip install x==1",
        "cd ..",
        "%%bash\nls",
        "print 'old'",
        "%%writefile a.py\nx = 1",
        "x = 1\nconda install x",
        "f(:",
    ],
)
def test_a_cell_that_is_not_python_is_named_and_the_rest_is_read(cell):
    recipe = convert_cells("x = 2\n", cell, LOAD)
    assert recipe.settings["model.path"] == "t5-small"
    [named] = [name for name in list_left_out(recipe) if "(cell 2" in name]
    assert named.partition(" (cell")[0] in cell


@pytest.mark.parametrize(
    "cell",
    [
        "!pip install \\\n  a \\\n  b",
        "files = !ls\n%cd x",
        "?f",
        "f?",
        "if x:\n    !ls\n    %pwd",
        "%%time\nx = 1",
        "y = ('%s'\n% x)",
    ],
)
def test_marked_commands_need_no_word(cell):
    recipe = convert_cells(cell, f"%%capture\n{LOAD}")
    assert recipe.settings["model.path"] == "t5-small"
    assert not any("(cell" in name for name in list_left_out(recipe))


def test_commands_of_exported_notebooks_are_left_out():
    assert convert(f"!pip install x\n{LOAD}%cd y\n").settings["model.path"] == "t5-small"


def test_a_broken_cell_with_the_model_is_named():
    with pytest.raises(ConfigError, match=r"cell 1, its line 1\).*not Python"):
        convert_cells(LOAD.replace(")\n", "\n"))
