# The names that FiveTune takes from transformers. The package's own __init__ imports the modules of all 500 models:
# with this one pyright reads a third of the files.
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.cache_utils import EncoderDecoderCache as EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.data.data_collator import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer as ByT5Tokenizer
from transformers.models.myt5.tokenization_myt5 import MyT5Tokenizer as MyT5Tokenizer
from transformers.models.t5.tokenization_t5 import T5Tokenizer as T5Tokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback as PrinterCallback
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.trainer_seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
from transformers.training_args_seq2seq import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
