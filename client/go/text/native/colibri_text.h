/* The C face of libcolibri_text: tokenizers and chat templates for client/go/text.
 *
 * Text is UTF-8 with its length, never terminated by a zero; what is not UTF-8 is refused. Every function may be called
 * by any number of threads at once, on the same object too. Nothing here reads files, prints, or ends the process: a
 * panic inside comes back as an error. */
#ifndef COLIBRI_TEXT_H
#define COLIBRI_TEXT_H

#include <stddef.h>
#include <stdint.h>

/* What a function gives, owned by the caller until colibri_text_free. len counts bytes; ids are uint32_t, aligned. */
typedef struct {
    uint8_t *data;
    size_t len;
    size_t capacity; /* for colibri_text_free only */
} colibri_bytes;

typedef struct colibri_tokenizer colibri_tokenizer;
typedef struct colibri_template colibri_template;

/* Each function with an out returns 0 for success, and else 1 with a message in out. In both cases out is to be
 * freed. */

/* From the text of a tokenizer.json. NULL: see out. */
colibri_tokenizer *colibri_tokenizer_new(const char *json, size_t len, colibri_bytes *out);
void colibri_tokenizer_drop(colibri_tokenizer *);

/* out: ids. add_special: also what the post-processor adds, such as a begin-of-text token. */
int colibri_tokenizer_encode(const colibri_tokenizer *, const char *text, size_t len, int add_special,
                             colibri_bytes *out);

/* out: text. Special tokens and ids without a token are left out. */
int colibri_tokenizer_decode(const colibri_tokenizer *, const uint32_t *ids, size_t count, colibri_bytes *out);

/* out: the token as the vocabulary writes it. 1 with no message: there is no such token. */
int colibri_tokenizer_token(const colibri_tokenizer *, uint32_t id, colibri_bytes *out);

/* From the source of a chat template. steps: instructions that one rendering may run. NULL: see out. */
colibri_template *colibri_template_new(const char *source, size_t len, uint64_t steps, colibri_bytes *out);
void colibri_template_drop(colibri_template *);

/* out: text, of at most limit bytes. variables: a JSON object. */
int colibri_template_render(const colibri_template *, const char *variables, size_t len, size_t limit,
                            colibri_bytes *out);

void colibri_text_free(colibri_bytes);

#endif
