package gateway

import colibri "colibri/client/go"

// stamped are the fields that GENERATE and SCORE have in common and that headers, key and served model decide.
type stamped struct {
	model, tenant, trace, requestID **string
	deadlineMS                      *uint64
}

func ofGenerate(g *colibri.Generate) stamped {
	return stamped{&g.Model, &g.Tenant, &g.Trace, &g.RequestID, &g.DeadlineMS}
}

func ofScore(s *colibri.Score) stamped {
	return stamped{&s.Model, &s.Tenant, &s.Trace, &s.RequestID, &s.DeadlineMS}
}

// stamp puts in what headers and key say. The model's name makes a request that crosses a reload fail, not change.
func (x *exchange) stamp(s stamped, model *served) (err error) {
	*s.model, *s.tenant, *s.trace, *s.requestID = &model.info.Name, x.tenant(), x.trace, &x.id
	*s.deadlineMS, err = x.deadline(*s.deadlineMS)
	return err
}

// direct checks a native request's length against the model it names and stamps it.
func (x *exchange) direct(d *deps, s stamped, tokens []uint32) error {
	model, err := d.models.named(x.r.Context(), value(*s.model))
	if err != nil {
		return err
	}
	if err := checkLength(tokens, model.info.MaxLen, "tokens"); err != nil {
		return err
	}
	return x.stamp(s, model)
}
